"""Triton kernels on npu beside torch's on the host's memory, in one run: ``nox -s bench -- triton``.

Matrix products by ``tl.dot`` beside torch's; a kernel that only moves memory beside a copy by torch, as a share of the
best copy; softmax, layer norm; and what a launch costs. Medians over interleaved samples of wall time, all cores.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tests.benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 15
SIZE = 1024  # of the matrices
ELEMENTS = 1 << 25  # of the vectors: 128 MiB of floats, more than any cache


@triton.jit
def matmul_kernel(a, b, c, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply a [M, K] and b [K, N] into c [M, N] of float32; all sizes are multiples of the blocks."""
    i, j, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    left, right = a + i[:, None] * K + k[None, :], b + k[:, None] * N + j[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(left), tl.load(right), acc, input_precision="ieee")
        left += BK
        right += BK * N
    tl.store(c + i[:, None] * N + j[None, :], acc)


@triton.jit
def scale_kernel(x, o, n, B: tl.constexpr):
    """Double a vector."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def softmax_kernel(x, o, columns, B: tl.constexpr):
    """Apply softmax to a row of at most B columns."""
    i = tl.arange(0, B)
    row = tl.program_id(0) * columns
    a = tl.load(x + row + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(a - tl.max(a, 0))
    tl.store(o + row + i, e / tl.sum(e, 0), mask=i < columns)


def main() -> None:
    """Print the table."""
    print(f"Machine: {machine()}\n")
    print("| kernel | npu Triton ms | torch ms | Triton / torch | first call s |")
    print("|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
        left, right, out = a.to("npu"), b.to("npu"), torch.empty(SIZE, SIZE, device="npu")
        product = matmul_kernel[SIZE // 64, SIZE // 64]
        report(
            f"tl.dot, {SIZE}^3, {dtype}",
            lambda run=product, left=left, right=right, out=out: run(left, right, out, SIZE, SIZE, 64, 64, 64),
            lambda a=a, b=b: a @ b,
        )
    x, y = torch.randn(ELEMENTS), torch.empty(ELEMENTS)
    source, target = x.to("npu"), torch.empty(ELEMENTS, device="npu")
    blocks = (triton.cdiv(ELEMENTS, 4096),)
    seconds, _ = report(
        "double 128 MiB", lambda: scale_kernel[blocks](source, target, ELEMENTS, 4096), lambda: torch.mul(x, 2, out=y)
    )
    rows, columns = 4096, 1000
    z = torch.randn(rows, columns)
    device, result = z.to("npu"), torch.empty(rows, columns, device="npu")
    report("softmax 4096 x 1000", lambda: softmax_kernel[(rows,)](device, result, columns, 1024), lambda: z.softmax(1))
    small, other = source[:64], target[:64]
    launch = median([lambda: [scale_kernel[(1,)](small, other, 64, 64) for _ in range(100)]])[0] / 100
    print(f"\nMemory: {2 * 4 * ELEMENTS / seconds / 1e9:.1f} GB/s. A launch: {launch * 1e6:.1f} us.")


def report(name: str, kernel: Callable[[], object], by_torch: Callable[[], object]) -> list[float]:
    """Print a line of the table; return the medians in seconds, the kernel's first."""
    began = time.perf_counter()
    kernel()
    first = time.perf_counter() - began
    ours, theirs = median([kernel, by_torch])
    print(f"| {name} | {ours * 1e3:.3f} | {theirs * 1e3:.3f} | {ours / theirs:.2f} | {first:.2f} |", flush=True)
    return [ours, theirs]


def median(functions: list[Callable[[], object]]) -> list[float]:
    """Return the median seconds of each, over samples taken in turn."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(SAMPLES):
        for function, into in zip(functions, samples, strict=True):
            began = time.perf_counter()
            function()
            into.append(time.perf_counter() - began)
    return [statistics.median(each) for each in samples]


if __name__ == "__main__":
    main()
