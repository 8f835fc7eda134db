"""Quantised experts beside bf16 experts, interleaved: ``python -m tests.benchmarks.quant_experts``.

A layer of Qwen3-30B-A3B's width with 32 of its 128 experts, 8 a token, more memory than the caches hold. Columns are how
many times faster the quantised experts are than npu-ops' bf16 experts on the same tokens and, run by an interpreter that
has vLLM's CPU build, on tiles, than vLLM's own kernel for the format. Medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops
from npu_ops import native, panels
from tests.benchmarks import quant_peers
from tests.benchmarks.quant import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

ops = torch.ops.npu_ops
HIDDEN, WIDTH, EXPERTS, TOP_K, WHOLE = 2048, 768, 32, 8, 1 << 30
SIZES = ((2, WIDTH, HIDDEN), (1, HIDDEN, WIDTH))  # projections, columns, elements of k
GATE = ("silu", 1.0, 0.0, math.inf, False)
NONE = (None, None, None)  # biases, expert map


def main() -> None:
    """Print a row a format."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.quant_experts", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| format | " + " | ".join(f"{tokens} tokens" for tokens in options.tokens) + " |")
    print("|---|" + "---|" * len(options.tokens))
    with torch.inference_mode():
        dense = bf16()
        for name in options.formats:
            make, make_peer = FORMATS[name]
            peer = make_peer(EXPERTS, HIDDEN, WIDTH)
            found = cells(make(), [dense] if peer is None else [dense, peer], options)
            print(f"| {name} | " + " | ".join(found) + " |", flush=True)


def cells(quantized: Call, others: list[Call], options: argparse.Namespace) -> list[str]:
    """Return, for each number of tokens, times our bf16 and perhaps times the peer."""
    result = []
    for tokens in options.tokens:
        rounds = []
        for _ in range(options.rounds + 1):
            x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
            weights, ids = torch.rand(tokens, EXPERTS).softmax(-1).topk(TOP_K)
            own = timed(quantized, x, weights, ids)
            rounds.append([timed(call, x, weights, ids) / own for call in others])
        base, *theirs = [f"{statistics.median(times):.2f}" for times in zip(*rounds[1:], strict=True)]
        result.append(base + (f" ({', '.join(theirs)})" if theirs else ""))
    return result


def timed(call: Call, *arguments: torch.Tensor) -> float:
    """Seconds of a call."""
    begin = clock()
    call(*arguments)
    return clock() - begin


def bf16() -> Call:
    """What the others are measured by."""
    w13, w2 = (torch.randn(EXPERTS, parts * n, k, dtype=torch.bfloat16) * 0.02 for parts, n, k in SIZES)
    gate = (GATE[0], False, *GATE[1:])
    return lambda x, weights, ids: ops.fused_experts(x, w13, w2, weights, ids, *NONE, *gate)


def panel_weights(width: int) -> list[torch.Tensor]:
    """Return random packed weights: of a panel's unit, 64 or 128 bytes."""
    shapes = [(EXPERTS, parts * n // panels.COLUMNS, k // 4, width) for parts, n, k in SIZES]
    return [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]


def weight_only(group: int, dtype: torch.dtype) -> Callable[[], Call]:
    """Weights of 4 bits; uint8 scales make it MXFP4."""

    def make() -> Call:
        w13, w2 = panel_weights(64)
        shapes = [(EXPERTS, parts * n // 32, k // group, 32) for parts, n, k in SIZES]
        scales = [
            torch.randint(110, 120, s).to(dtype) if dtype == torch.uint8 else torch.rand(s).to(dtype) for s in shapes
        ]
        pairs = (w13, scales[0], None, w2, scales[1], None)
        return lambda x, weights, ids: ops.weight_only_experts(x, *pairs, weights, ids, *NONE, WIDTH, group, *GATE)

    return make


def nvfp4() -> Call:
    """Weights of 4 bits in blocks of 16, whose scales have 8, and a factor a column."""
    codes = panel_weights(64)
    scales = []
    for parts, n, k in SIZES:
        of = (torch.rand(EXPERTS, parts * n, k // 16) * 400 + 20).to(torch.float8_e4m3fn)
        scales.append(torch.stack([panels.pack_scaled_groups(expert, torch.full((parts * n,), 1e-5)) for expert in of]))
    pairs = (codes[0], scales[0], None, codes[1], scales[1], None)
    return lambda x, weights, ids: ops.weight_only_experts(x, *pairs, weights, ids, *NONE, WIDTH, 16, *GATE)


def int8() -> Call:
    """Weights and activations of 8 bits."""
    (w13, w2), (s13, s2) = panel_weights(128), (torch.rand(EXPERTS, parts * n) for parts, n, _ in SIZES)
    return lambda x, weights, ids: ops.int8_experts(x, w13, s13, w2, s2, weights, ids, *NONE, WIDTH, *GATE)


def fp8(block: int | None) -> Callable[[], Call]:
    """Weights in fp8, activations rounded: by channel and token, or by blocks."""

    def make() -> Call:
        tensors = []
        for parts, n, k in SIZES:
            weight = quant_peers.e4m3_weights(EXPERTS, parts * n, k).view(torch.uint8)
            packs = native.reads_fp8_panels()
            tensors.append(torch.stack([panels.pack_bytes(expert) for expert in weight]) if packs else weight)
            scales = n if block is None else n // block * (k // block)
            tensors.append(torch.rand(EXPERTS, parts * scales))
        blocks = (-1, 1, WHOLE) if block is None else (block, block, block)
        rest = (None, None, *blocks, *GATE)
        return lambda x, weights, ids: ops.fp8_experts(x, *tensors, weights, ids, *NONE, *rest)

    return make


FORMATS: dict[str, tuple[Callable[[], Call], Callable[[int, int, int], Call | None]]] = {
    "W4A16, groups of 32": (weight_only(32, torch.bfloat16), partial(quant_peers.experts_int4, 32)),
    "W4A16, groups of 128": (weight_only(128, torch.bfloat16), partial(quant_peers.experts_int4, 128)),
    "MXFP4": (weight_only(32, torch.uint8), quant_peers.experts_mxfp4),
    "NVFP4": (nvfp4, lambda *sizes: None),
    "W8A8 int8": (int8, quant_peers.experts_int8),
    "fp8 by channel": (fp8(None), lambda *sizes: None),
    "fp8 by blocks": (fp8(128), quant_peers.experts_fp8),
}

if __name__ == "__main__":
    main()
