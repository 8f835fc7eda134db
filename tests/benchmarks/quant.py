"""Quantised linear layers beside the bf16 layer and vLLM's CPU kernels, interleaved: ``python -m tests.benchmarks.quant``.

Weights are rotated over enough copies that each call reads them from memory, as a model does. Columns are how many times
faster the quantised layer is than npu-ops' bf16 linear of the same shape, and, run by an interpreter that has vLLM's CPU
build, than vLLM's own kernel for the format. Medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops
from npu_ops import panels

try:
    import vllm._custom_ops as peer
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    PEER = hasattr(torch.ops._C, "cpu_gemm_wna16")
except ImportError:
    PEER = False

ops = torch.ops.npu_ops
Layer = Callable[[torch.Tensor], torch.Tensor]
MEMORY = 200 << 20  # bytes of bf16 weights to rotate over: beyond the caches
SHAPES = {"Qwen3-0.6B gate_up": (6144, 1024), "Qwen3-0.6B down": (1024, 3072), "Llama-3.2-1B qkv": (3072, 2048)}


def main() -> None:
    """Print a table a format."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.quant", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| format | layer | " + " | ".join(f"{rows} rows" for rows in options.rows) + " |")
    print("|---|---|" + "---|" * len(options.rows))
    with torch.inference_mode():
        for name in options.formats:
            for shape in options.shapes:
                print(f"| {name} | {shape} | " + " | ".join(cells(name, *SHAPES[shape], options)) + " |", flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


def cells(name: str, n: int, k: int, options: argparse.Namespace) -> list[str]:
    """Return, for each number of rows, times our bf16 and perhaps times the peer."""
    copies = max(2, MEMORY // (n * k * 2))
    dense, ours, theirs = [], [], []
    make, make_peer = FORMATS[name]
    for _ in range(copies):
        weight = torch.randn(n, k, dtype=torch.bfloat16) * 0.02
        dense.append(lambda x, w=weight: ops.linear(x, w, None))
        ours.append(make(n, k))
        if PEER and make_peer is not None:
            theirs.append(make_peer(n, k))
    result = []
    for rows in options.rows:
        x = torch.randn(rows, k, dtype=torch.bfloat16)
        calls = min(copies, max(2, 64 // rows))
        base, peers = [], []
        for _ in range(options.rounds):
            own = timed(ours[:calls], x)
            base.append(timed(dense[:calls], x) / own)
            if theirs:
                peers.append(timed(theirs[:calls], x) / own)
        result.append(f"{statistics.median(base):.2f}" + (f" ({statistics.median(peers):.2f})" if peers else ""))
    return result


def timed(layers: list[Layer], x: torch.Tensor) -> float:
    """Seconds of the median call."""
    times = []
    for layer in layers:
        begin = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def int4(group: int, zeros: bool) -> Callable[[int, int], Layer]:
    """Weights of 4 bits."""

    def make(n: int, k: int) -> Layer:
        weight = panels.pack(torch.randint(0, 16, (n, k)), 4)
        scales = panels.pack_groups(torch.rand(n, k // group).bfloat16())
        zero = panels.pack_groups(torch.randint(0, 16, (n, k // group)).to(torch.int8)) if zeros else None
        return lambda x: ops.weight_only_linear(x, weight, scales, zero, None, None, n, group)

    return make


def int4_peer(group: int, zeros: bool) -> Callable[[int, int], Layer]:
    """vLLM's W4A16 kernel, as its CPU layer calls it."""

    def make(n: int, k: int) -> Layer:
        weight = torch.randint(-(2**31), 2**31, (n // 16, k * 2), dtype=torch.int64).int()
        scales = torch.rand(k // group, n).bfloat16()
        zero = torch.randint(-(2**31), 2**31, (k // group, n // 8), dtype=torch.int64).int() if zeros else None
        isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        return lambda x: peer.cpu_gemm_wna16(
            input=x, q_weight=weight, scales=scales, zeros=zero, g_idx=None, bias=None, pack_factor=8, isa_hint=isa
        )

    return make


def int8(n: int, k: int) -> Layer:
    """Weights and activations of 8 bits, by channel and token."""
    weight = panels.pack(torch.randint(-128, 128, (n, k)).to(torch.int8), 8)
    scale = torch.rand(n)

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, x_scale, _ = ops.dynamic_int8_quant(x, True)
        return ops.int8_linear(q, x_scale, None, weight, scale, None, None, n, x.dtype)

    return layer


def int8_peer(n: int, k: int) -> Layer:
    """vLLM's oneDNN kernel, as its CPU layer calls it."""
    weight, scale = torch.randint(-128, 128, (n, k)).to(torch.int8).t(), torch.rand(n, 1)
    handler = peer.create_onednn_scaled_mm(weight, scale, torch.bfloat16, True, False, 32)

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, x_scale, x_zero = peer.onednn_scaled_int8_quant(x, None, None, True)
        out = torch.empty(len(x), n, dtype=x.dtype)
        peer.onednn_scaled_mm(handler, q, out, x_scale, x_zero, None, None)
        return out

    return layer


def fp8(block: int, x_group: int) -> Callable[[int, int], Layer]:
    """Weights of 8-bit floats with scales of blocks or, for 0, of channels."""

    def make(n: int, k: int) -> Layer:
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        scale = torch.rand((n // block) * (k // block)) if block else torch.rand(n)
        blocks = (block, block) if block else (1, k)
        return lambda x: ops.fp8_linear(x, weight, scale, None, None, x_group and min(x_group, k), *blocks)

    return make


FORMATS: dict[str, tuple[Callable[[int, int], Layer], Callable[[int, int], Layer] | None]] = {
    "W4A16, groups of 128": (int4(128, False), int4_peer(128, False)),
    "W4A16, groups of 32, zero points": (int4(32, True), int4_peer(32, True)),
    "W8A8 int8": (int8, int8_peer),
    "W8A16 fp8, channels": (fp8(0, 0), None),
    "W8A8 fp8, blocks of 128": (fp8(128, 128), None),
}


if __name__ == "__main__":
    main()
