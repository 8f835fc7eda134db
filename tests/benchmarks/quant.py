"""Quantised linear layers beside the bf16 layer and vLLM's CPU kernels, interleaved: ``python -m tests.benchmarks.quant``.

Weights are rotated over enough copies that each call reads them from memory, as a model does. Columns are how many times
faster the quantised layer is than npu-ops' bf16 linear of the same shape, and, run by an interpreter that has vLLM's CPU
build, than vLLM's own kernels for the format: for 4 bits W4A16 and, on tiles, W4A8, which vLLM prefers there. Medians of
the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops
from npu_ops import native, panels
from tests.benchmarks import quant_peers

ops = torch.ops.npu_ops
Call = Callable[[torch.Tensor], torch.Tensor]
Layer = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
WHOLE = 1 << 30  # a block of all
MEMORY = 200 << 20  # bytes of bf16 weights to rotate over: beyond the caches
# With one thread its own time, which a busy machine does not lengthen.
clock = time.thread_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
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
    make, peers = FORMATS[name]
    dense, ours = rotated(bf16(n, k), copies), rotated(make(n, k), copies)
    others = [dense, *(rotated(peer(n, k), copies) for peer in peers)]
    result = []
    for rows in options.rows:
        x = torch.randn(rows, k, dtype=torch.bfloat16)
        calls = min(copies, max(2, 64 // rows))
        for layers in (ours, *others):  # what is made at a first call
            timed(layers[:calls], x)
        rounds = []
        for _ in range(options.rounds):
            own = timed(ours[:calls], x)
            rounds.append([timed(layers[:calls], x) / own for layers in others])
        base, *theirs = [f"{statistics.median(times):.2f}" for times in zip(*rounds, strict=True)]
        result.append(base + (f" ({', '.join(theirs)})" if theirs else ""))
    return result


def rotated(layer: Layer, copies: int) -> list[Call]:
    """Return the layer on several copies of its tensors."""
    call, tensors = layer
    made = [tensors, *(tuple(t.clone() for t in tensors) for _ in range(copies - 1))]
    return [lambda x, own=own: call(x, *own) for own in made]


def timed(layers: list[Call], x: torch.Tensor) -> float:
    """Seconds of the median call."""
    times = []
    for layer in layers:
        begin = clock()
        layer(x)
        times.append(clock() - begin)
    return statistics.median(times)


def bf16(n: int, k: int) -> Layer:
    """The layer that the others are measured by."""
    return lambda x, w: ops.linear(x, w, None), (torch.randn(n, k, dtype=torch.bfloat16) * 0.02,)


def int4(group: int, zeros: bool) -> Callable[[int, int], Layer]:
    """Weights of 4 bits."""

    def make(n: int, k: int) -> Layer:
        weight = panels.pack(torch.randint(0, 16, (n, k), dtype=torch.uint8), 4)
        scales = panels.pack_groups(torch.rand(n, k // group).bfloat16())
        zero = (panels.pack_groups(torch.randint(0, 16, (n, k // group), dtype=torch.int8)),) if zeros else ()
        return lambda x, w, s, z=None: ops.weight_only_linear(x, w, s, z, None, None, n, group), (weight, scales, *zero)

    return make


def nvfp4(n: int, k: int) -> Layer:
    """Weights of 4 bits in blocks of 16, whose scales have 8, and a factor a column."""
    weight = panels.pack(torch.randint(0, 16, (n, k), dtype=torch.uint8), 4)
    scales = panels.pack_scaled_groups(
        (torch.rand(n, k // 16) * 400 + 20).to(torch.float8_e4m3fn), torch.full((n,), 1e-5)
    )
    return lambda x, w, s: ops.weight_only_linear(x, w, s, None, None, None, n, 16), (weight, scales)


def mxfp8(n: int, k: int) -> Layer:
    """Weights of 8-bit floats in blocks of 32, whose scales are powers of two."""
    weight = panels.pack(panels.e4m3_codes(quant_peers.e4m3_weights(n, k)), 8)
    scales = panels.pack_groups(torch.randint(110, 120, (n, k // 32)).to(torch.uint8))
    return lambda x, w, s: ops.weight_only_linear(x, w, s, None, None, None, n, 32), (weight, scales)


def int8(n: int, k: int) -> Layer:
    """Weights and activations of 8 bits, by channel and token."""

    def call(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return ops.int8_linear_dynamic(x, True, w, s, None, None, n)

    return call, (panels.pack(torch.randint(-128, 128, (n, k), dtype=torch.int8), 8), torch.rand(n))


def fp8(block: int, x_group: int) -> Callable[[int, int], Layer]:
    """Weights of 8-bit floats with scales of blocks or, for 0, of channels; x rounded by groups, or for 0 as it is."""

    def make(n: int, k: int) -> Layer:
        scale = torch.rand(-(-n // block) * -(-k // block)) if block else torch.rand(n)
        blocks = (block, block) if block else (1, k)
        weight = quant_peers.e4m3_weights(n, k)
        if native.reads_fp8_panels():
            weight = panels.pack_bytes(weight)
        return lambda x, w, s: ops.fp8_linear(x, w, s, None, None, min(x_group, k), *blocks), (weight, scale)

    return make


FORMATS: dict[str, tuple[Callable[[int, int], Layer], list[Callable[[int, int], Layer]]]] = {
    "W4A16, groups of 128": (int4(128, False), quant_peers.layers_int4(128, False)),
    "W4A16, groups of 32, zero points": (int4(32, True), quant_peers.layers_int4(32, True)),
    "NVFP4": (nvfp4, []),
    "MXFP8": (mxfp8, []),
    "W8A8 int8": (int8, quant_peers.layers_int8()),
    "W8A16 fp8, channels": (fp8(0, 0), []),
    "W8A8 fp8, one scale": (fp8(WHOLE, WHOLE), quant_peers.layers_fp8(0)),
    "W8A8 fp8, blocks of 128": (fp8(128, 128), quant_peers.layers_fp8(128)),
}


if __name__ == "__main__":
    main()
