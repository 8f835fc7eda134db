"""One mixture-of-experts layer beside vLLM's CPU kernel, interleaved in one process: ``python -m tests.benchmarks.moe``.

Run it by an interpreter that has vLLM's CPU build and npu-ops (``PYTHONPATH=packages/npu-ops/src``). Both have the same
random bf16 weights and take other random experts in each call; the figures are medians, the ratio is the median of the
rounds' ratios. GB/s counts the weights of the experts that a call chooses, GFLOP/s the products.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import vllm._custom_ops as peer
from torch import Tensor
from vllm.platforms import current_platform

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops

ops = torch.ops.npu_ops


@dataclass(frozen=True)
class Shape:
    """One layer of a model."""

    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "Mixtral, a quarter": Shape(4096, 3584, 8, 2),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.moe", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    current_platform.import_kernels()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| layer | tokens | vLLM CPU (ms) | npu-ops (ms) | ratio | GB/s | GFLOP/s |\n|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for name in options.shapes:
            layer = Layer(SHAPES[name])
            for tokens in options.tokens:
                print_row(name, layer, tokens, options.rounds)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


class Layer:
    """The weights of both sides."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.w13 = random(shape.experts, 2 * shape.width, shape.hidden)
        self.w2 = random(shape.experts, shape.hidden, shape.width)
        isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        self.isa = isa
        self.packed = [peer.cpu_prepack_moe_weight(w, isa) for w in (self.w13, self.w2)]

    def theirs(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """vLLM's kernel."""
        out = torch.empty_like(x)
        peer.cpu_fused_moe(out, x, *self.packed, None, None, weights, ids, "silu", self.isa)
        return out

    def ours(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The kernel of npu-ops."""
        plain = ("silu", False, 1.0, 0.0, float("inf"), False)
        return ops.fused_experts(x, self.w13, self.w2, weights, ids, None, None, None, *plain)


def print_row(name: str, layer: Layer, tokens: int, rounds: int) -> None:
    """Measure one batch size."""
    shape = layer.shape
    samples: list[tuple[float, float]] = []
    touched: list[int] = []
    for _ in range(rounds + 1):  # the first warms up
        x = random(tokens, shape.hidden)
        weights, ids = ops.select_experts(
            torch.randn(tokens, shape.experts), shape.top_k, "softmax", True, 1, None, 0, 0
        )
        arguments = (x, weights, ids)
        expected, actual = layer.theirs(*arguments).float(), layer.ours(*arguments).float()
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
        calls = max(1, 8 // tokens)
        samples.append((seconds(layer, layer.theirs, tokens, calls), seconds(layer, layer.ours, tokens, calls)))
        touched.append(ids.unique().numel())
    del samples[0]
    theirs, ours = (statistics.median(side) for side in zip(*samples, strict=True))
    ratio = statistics.median(a / b for a, b in samples)
    matrices = 3 * shape.hidden * shape.width
    rate = statistics.median(touched) * matrices * 2 / ours / 1e9
    flops = tokens * shape.top_k * matrices * 2 / ours / 1e9
    print(
        f"| {name} | {tokens} | {theirs * 1e3:.2f} | {ours * 1e3:.2f} | {ratio:.2f} | {rate:.1f} | {flops:.0f} |",
        flush=True,
    )


def seconds(layer: Layer, run: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int, calls: int) -> float:
    """Time of one call, each with experts of its own."""
    shape = layer.shape
    inputs = []
    for _ in range(calls):
        weights, ids = torch.rand(tokens, shape.experts).topk(shape.top_k, dim=-1)
        inputs.append((random(tokens, shape.hidden), weights.contiguous(), ids.int().contiguous()))
    start = time.perf_counter()
    for one in inputs:
        run(*one)
    return (time.perf_counter() - start) / calls


def random(*shape: int) -> Tensor:
    """A bf16 tensor of the size that trained weights have."""
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)


if __name__ == "__main__":
    main()
