"""What the device costs over torch's CPU device, in one run: ``python -m tests.benchmarks.device [--busy]``.

Ops: thread CPU time of one call, medians over interleaved samples, one thread. The limit of a boxed fallback is the CPU
op plus 0.9 us, that of a registered kernel the CPU op itself. ``--busy`` runs beside a process that takes one core.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops
from tests.benchmarks.__main__ import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, CALLS = 41, 400
Op = Callable[[], object]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.device", description=__doc__)
    parser.add_argument("--busy", action="store_true", help="run beside a process that takes one core")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.npu.set_num_threads(1)
    print(f"Machine: {machine()}{', beside a busy process' if options.busy else ''}\n")
    with torch.inference_mode(), neighbour() if options.busy else contextlib.nullcontext():
        print_ops()
        print_allocator()
        print_replay()


def print_ops() -> None:
    """Print the cost of one call of each op, on both devices."""
    print("| op (bf16) | path | cpu (us) | npu (us) | npu - cpu (us) |\n|---|---|---|---|---|")
    for name, (path, host, device) in ops().items():
        theirs, ours = interleaved(host, device)
        print(f"| {name} | {path} | {theirs:.2f} | {ours:.2f} | {ours - theirs:+.2f} |")


def ops() -> dict[str, tuple[str, Op, Op]]:
    """Return name -> path taken on npu, the op on cpu, the op on npu."""
    made = {}
    for device in ("cpu", "npu"):
        x = torch.randn(1, 1024, dtype=torch.bfloat16).to(device)
        one, small = torch.ones(1, device=device), torch.randn(1, 64, dtype=torch.bfloat16).to(device)
        weight = torch.randn(64, 64, dtype=torch.bfloat16).to(device)
        table, ids = torch.randn(1000, 1024, dtype=torch.bfloat16).to(device), torch.arange(4).to(device)
        gate = torch.randn(1, 2048, dtype=torch.bfloat16).to(device)
        norm = torch.ones(1024, dtype=torch.bfloat16).to(device)
        made[device] = {
            "mul, 1 element": lambda one=one: one * one,
            "mul 1x1024": lambda x=x: x * x,
            "add_ 1x1024": lambda x=x: x.add_(x),
            "softmax 1x1024": lambda x=x: x.softmax(-1),
            "cat of 2": lambda x=x: torch.cat((x, x)),
            "index_select 4 of 1000": lambda table=table, ids=ids: table.index_select(0, ids),
            "view": lambda x=x: x.view(2, 512),
            "empty 1x1024": lambda device=device: torch.empty(1, 1024, device=device),
            "item": lambda one=one: one.item(),
            "linear 1x64x64": lambda s=small, w=weight: F.linear(s, w),
            "npu_ops.rms_norm 1x1024": lambda x=x, n=norm: torch.ops.npu_ops.rms_norm(x, n, 1e-6),
            "npu_ops.silu_and_mul 1x2048": lambda g=gate: torch.ops.npu_ops.silu_and_mul(g),
        }
    native = ("view", "empty", "item", "linear", "npu_ops")
    return {
        name: ("registered" if name.startswith(native) else "fallback", op, made["npu"][name])
        for name, op in made["cpu"].items()
    }


def print_allocator() -> None:
    """Print what an allocation from the cache, and its release, cost."""
    sizes = (64, 4096, 1 << 20)
    print("\n| torch.empty and its end, bytes | cpu (us) | npu (us) |\n|---|---|---|")
    for size in sizes:
        theirs, ours = interleaved(
            lambda size=size: torch.empty(size, dtype=torch.uint8),
            lambda size=size: torch.empty(size, dtype=torch.uint8, device="npu"),
        )
        print(f"| {size} | {theirs:.2f} | {ours:.2f} |")


def print_replay(layers: int = 24, width: int = 64) -> None:
    """Print the time of a replay beside the time of its kernels' own work, which is the same step run eagerly on cpu."""
    weights = [torch.randn(width, width, dtype=torch.bfloat16) / width**0.5 for _ in range(layers)]
    state = torch.randn(1, width, dtype=torch.bfloat16)
    on_device, device_state = [weight.to("npu") for weight in weights], state.to("npu")

    def step(x: torch.Tensor, layer_weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in layer_weights:
            x = torch.ops.npu_ops.linear(x, weight, None)
        return x

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        step(device_state, on_device)
    eager, replay = interleaved(lambda: step(device_state, on_device), graph.replay, calls=20)
    print("\n| step of linears on npu | eager (us a layer) | replay (us a layer) |\n|---|---|---|")
    print(f"| {layers} x [1, {width}] by [{width}, {width}] | {eager / layers:.2f} | {replay / layers:.2f} |")


def interleaved(first: Op, second: Op, calls: int = CALLS) -> tuple[float, float]:
    """Return the medians of both in microseconds of this thread's CPU time a call."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(SAMPLES):
        for op, into in zip((first, second), samples, strict=True):
            began = time.thread_time_ns()
            for _ in range(calls):
                op()
            into.append((time.thread_time_ns() - began) / calls / 1e3)
    return statistics.median(samples[0]), statistics.median(samples[1])


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Keep one core busy with another process."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(1)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
