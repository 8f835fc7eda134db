"""``torch.compile`` on npu beside eager npu and compiled CPU, in one run: ``python -m tests.benchmarks.compile``.

A Llama-like block in bfloat16 (norms, rotary embedding, attention, gated MLP), forward alone and with its backward.
Medians over interleaved samples of wall time, all cores. The last column compares the compiled ones.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import TYPE_CHECKING

import torch

from tests.benchmarks.machine import machine
from tests.support.llama_block import LlamaBlock

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = 31
# width, heads, size of the MLP, tokens, whether with a backward
CASES = (
    (256, 4, 768, 1, False),
    (256, 4, 768, 64, False),
    (1024, 16, 3072, 1, False),
    (1024, 16, 3072, 64, False),
    (256, 4, 768, 64, True),
)


def main() -> None:
    """Print the table."""
    print(f"Machine: {machine()}\n")
    print(
        "| width | tokens | pass | npu eager ms | npu compiled ms | faster | cpu eager ms | cpu compiled ms | npu / cpu |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for width, heads, inner, tokens, training in CASES:
        torch._dynamo.reset()
        eager, compiled, cpu, cpu_compiled = measure(LlamaBlock(width, heads, inner), tokens, training)
        print(
            f"| {width} | {tokens} | {'forward, backward' if training else 'forward'} | {eager:.3f} | {compiled:.3f} | "
            f"{eager / compiled:.2f} x | {cpu:.3f} | {cpu_compiled:.3f} | {compiled / cpu_compiled:.2f} |",
            flush=True,
        )


def measure(block: LlamaBlock, tokens: int, training: bool) -> list[float]:
    """Return the medians in ms of npu eager, npu compiled, cpu eager and cpu compiled."""
    steps: list[Callable[[], object]] = []
    for device in ("npu", "cpu"):
        module = copy.deepcopy(block).to(device, torch.bfloat16)
        x = torch.randn(1, tokens, block.width).to(device, torch.bfloat16)
        positions = torch.arange(tokens).to(device)
        steps += [step(each, x, positions, training) for each in (module, torch.compile(module, dynamic=False))]
    for each in steps:
        each()
        each()
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(SAMPLES):
        for each, into in zip(steps, samples, strict=True):
            began = time.perf_counter()
            each()
            into.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(each) for each in samples]


def step(
    module: Callable[..., torch.Tensor], x: torch.Tensor, positions: torch.Tensor, training: bool
) -> Callable[[], object]:
    """Return a function that runs the module once, with its backward when training."""

    def forward() -> object:
        with torch.inference_mode():
            return module(x, positions)

    def forward_and_backward() -> object:
        loss = module(x, positions).float().square().mean()
        loss.backward()
        return loss

    return forward_and_backward if training else forward


if __name__ == "__main__":
    main()
