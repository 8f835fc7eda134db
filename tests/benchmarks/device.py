"""What the device costs over torch's CPU device, in one run: ``python -m tests.benchmarks.device [--busy]``.

Ops and allocations: thread CPU time of one call on one thread, medians over the quarter of the interleaved samples that the
machine disturbed least; "over" is the median of the differences of neighbouring ones. Steps: wall time of replays on all cores. ``--busy`` runs beside a process that
takes one core. The bars are those of the design: 0.9 us over the CPU's op for a fallback, nothing for a registered kernel,
0.5 us for an allocation from the cache and its release, 5 % of a replayed decode step for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import npu_ops  # noqa: F401 - registers torch.ops.npu_ops
from tests.benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, CALLS = 80, 200
FALLBACK_BAR, ALLOCATION_BAR, HOST_BAR = 0.9, 0.5, 5.0
Op = Callable[[], object]
Step = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
kernels = torch.ops.npu_ops


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.device", description=__doc__)
    parser.add_argument("--busy", action="store_true", help="run beside a process that takes one core")
    options = parser.parse_args()
    cores = torch.npu.get_num_threads()
    print(f"Machine: {machine()}{', beside a busy process' if options.busy else ''}\n")
    with torch.inference_mode(), neighbour() if options.busy else contextlib.nullcontext():
        torch.set_num_threads(1)
        torch.npu.set_num_threads(1)
        print_ops()
        print_allocations()
        print_launches()
        torch.set_num_threads(cores)
        torch.npu.set_num_threads(cores)
        print_decode_step()


# ---- ops ----


def print_ops() -> None:
    """Print the cost of one call of each op, on both devices."""
    print("| op (bf16) | path | cpu (us) | npu (us) | over (us) | bar (us) |\n|---|---|---|---|---|---|")
    theirs, ours = operands("cpu"), operands("npu")
    for path, make, bar in (("fallback", fallbacks, FALLBACK_BAR), ("registered", registered, 0.0)):
        for (name, host), device in zip(make(theirs).items(), make(ours).values(), strict=True):
            on_host, on_device, over = interleaved(host, device)
            print(f"| {name} | {path} | {on_host:.2f} | {on_device:.2f} | {over:+.2f} | {bar:.1f} |", flush=True)


def operands(device: str) -> SimpleNamespace:
    """Return the tensors that the ops take."""
    return SimpleNamespace(
        device=device,
        one=torch.ones(1).to(device),
        x=randn(1, 1024).to(device),
        residual=randn(1, 1024).to(device),
        gate=randn(1, 2048).to(device),
        small=randn(1, 64).to(device),
        heads=randn(1, 16, 128).to(device),
        floats=torch.randn(1, 1024).to(device),
        mask=torch.randn(1, 1024).gt(0).to(device),
        weight=randn(64, 64).to(device),
        norm=randn(1024).to(device),
        table=randn(1000, 1024).to(device),
        ids=torch.arange(4).to(device),
    )


def fallbacks(t: SimpleNamespace) -> dict[str, Op]:
    """Return ops that have no kernel of the device: their CPU kernel runs on aliases."""
    return {
        "mul, 1 element": lambda: t.one * t.one,
        "mul 1x1024": lambda: t.x * t.x,
        "mul 1x1024 by a number": lambda: t.x * 2.0,
        "add 1x1024": lambda: t.x + t.x,
        "add_ 1x1024": lambda: t.x.add_(t.x),
        "silu 1x1024": lambda: F.silu(t.x),
        "softmax 1x1024": lambda: t.x.softmax(-1),
        "layer_norm 1x1024": lambda: F.layer_norm(t.x, (1024,), t.norm, t.norm),
        "mm 1x64x64": lambda: t.small @ t.weight,
        "cat of 2": lambda: torch.cat((t.x, t.x)),
        "where 1x1024": lambda: torch.where(t.mask, t.floats, t.floats),
        "index_select 4 of 1000": lambda: t.table.index_select(0, t.ids),
        "index 4 of 1000": lambda: t.table[t.ids],
        "embedding 4 of 1000": lambda: F.embedding(t.ids, t.table),
        "to float32 1x1024": t.x.float,
        "sum 1x1024": t.floats.sum,
        "argmax 1x1024": lambda: t.floats.argmax(-1),
        "cumsum 1x1024": lambda: t.floats.cumsum(-1),
        "topk 5 of 1024": lambda: t.floats.topk(5),
        "sort 1x64": lambda: t.small.sort(-1),
        "fill_ 1x1024": lambda: t.x.fill_(1.0),
        "arange 8": lambda: torch.arange(8, device=t.device),
    }


def registered(t: SimpleNamespace) -> dict[str, Op]:
    """Return ops that are the device's own, or have a kernel in npu_ops."""
    return {
        "view": lambda: t.x.view(2, 512),
        "slice": lambda: t.x[:, :4],
        "empty 1x1024": lambda: torch.empty(1, 1024, device=t.device),
        "empty_like 1x1024": lambda: torch.empty_like(t.x),
        "zero_ 1x1024": t.x.zero_,
        "copy_ 1x1024": lambda: t.x.copy_(t.residual),
        "clone 1x1024": t.x.clone,
        "contiguous 16x1x128": lambda: t.heads.transpose(0, 1).contiguous(),
        "item": t.one.item,
        "linear 1x64x64": lambda: F.linear(t.small, t.weight),
        "npu_ops.linear 1x64x64": lambda: kernels.linear(t.small, t.weight, None),
        "npu_ops.rms_norm 1x1024": lambda: kernels.rms_norm(t.x, t.norm, 1e-6),
        "npu_ops.fused_add_rms_norm 1x1024": lambda: kernels.fused_add_rms_norm(t.x, t.residual, t.norm, 1e-6),
        "npu_ops.silu_and_mul 1x2048": lambda: kernels.silu_and_mul(t.gate),
    }


def randn(*sizes: int) -> torch.Tensor:
    """Return random bfloat16 values on the CPU."""
    return torch.randn(*sizes, dtype=torch.bfloat16)


# ---- allocations ----


def print_allocations() -> None:
    """Print what an allocation from the cache, and its release, cost: a tensor with memory beside one without."""
    print("\n| allocation and release of | over a tensor of no bytes (us) | bar (us) |\n|---|---|---|")
    for size in (64, 4096, 1 << 18, 1 << 20, 1 << 24):
        _, _, over = interleaved(
            lambda: torch.empty(0, dtype=torch.uint8, device="npu"),
            lambda size=size: torch.empty(size, dtype=torch.uint8, device="npu"),
        )
        print(f"| {size} bytes | {over:.2f} | {ALLOCATION_BAR} |")


# ---- graphs ----


def print_launches(layers: int = 24, width: int = 64) -> None:
    """Print a step of small layers, where the cost of a launch shows."""
    weights, state = [randn(width, width).to("npu") for _ in range(layers)], randn(1, width).to("npu")

    def step(x: torch.Tensor, layer_weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in layer_weights:
            x = kernels.linear(x, weight, None)
        return x

    graph = captured(step, state, weights)
    eager, replay, _ = interleaved(lambda: step(state, weights), graph.replay, calls=20)
    print("\n| step of linears on npu | eager (us a layer) | replay (us a layer) |\n|---|---|---|")
    print(f"| {layers} x [1, {width}] by [{width}, {width}] | {eager / layers:.2f} | {replay / layers:.2f} |")


def print_decode_step(layers: int = 28, width: int = 1024, inner: int = 3072, rounds: int = 15) -> None:
    """Print the host's share of a replay of decode-size layers, and that its first step pays no first touch of weights.

    Outside kernels: the wall time of a replay less the times of its kernels, which the device notes for the profiler
    (upper bound: the noting counts as host time). Without rows: the same launches on tensors of no rows, so all of a
    replay but the arithmetic.
    """
    before = page_faults()
    weights = [randn(*size).to("npu") for _ in range(layers) for size in ((width,), (inner, width), (width, inner))]
    at_load = page_faults() - before
    state = randn(1, width).to("npu")
    decode_step(state, weights[:3])  # what a first launch of a kernel costs is not asked for
    before, began = page_faults(), time.perf_counter()
    decode_step(state, weights)
    first, in_first = time.perf_counter() - began, page_faults() - before

    graph, empty = captured(decode_step, state, weights), captured(decode_step, state[:0], weights)
    replay = statistics.median(wall(graph.replay) for _ in range(rounds))
    launches, outside = outside_kernels(graph, rounds)
    without_rows = statistics.median(wall(empty.replay) for _ in range(rounds))
    name = f"{layers} layers of [1, {width}] by [{width}, {inner}] and back"
    print(
        "\n| step | launches | replay (ms) | outside kernels (%) | without rows (us) | (%) | bar (%) |\n|---|---|---|---|---|---|---|"
    )
    print(
        f"| {name} | {launches} | {replay * 1e3:.2f} | {100 * outside:.2f} | {without_rows * 1e6:.1f} | "
        f"{100 * without_rows / replay:.2f} | {HOST_BAR} |"
    )
    later = statistics.median(wall(lambda: decode_step(state, weights)) for _ in range(rounds))
    print(
        "\n| weights | page faults at load | in the first step | first step (ms) | later (ms) |\n|---|---|---|---|---|"
    )
    size = sum(weight.nbytes for weight in weights) >> 20
    print(f"| {size} MiB | {at_load} | {in_first} | {first * 1e3:.2f} | {later * 1e3:.2f} |")


def decode_step(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return what is left of a decoder's step without its attention; kernels of npu_ops and two fallbacks a layer."""
    for norm, up, down in zip(*[iter(weights)] * 3, strict=True):
        x = x + kernels.linear(F.silu(kernels.linear(kernels.rms_norm(x, norm, 1e-6), up, None)), down, None)
    return x


def captured(step: Step, state: torch.Tensor, weights: list[torch.Tensor]) -> torch.npu.NPUGraph:
    """Return a graph of a step that has run before."""
    step(state, weights)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        step(state, weights)
    graph.replay()
    return graph


def outside_kernels(graph: torch.npu.NPUGraph, rounds: int) -> tuple[int, float]:
    """Return the launches of a replay, and the share of its time that is in none: the median."""
    shares = []
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.PrivateUse1]) as profiler:
            total = wall(graph.replay)
        ran = [event for event in profiler.events() if event.device_type == DeviceType.PrivateUse1]
        shares.append(1 - sum(event.time_range.elapsed_us() for event in ran) / 1e6 / total)
    return len(ran), statistics.median(shares)


# ---- clocks ----


def interleaved(first: Op, second: Op, calls: int = CALLS) -> tuple[float, float, float]:
    """Return the medians of both and of their difference, in microseconds of this thread's CPU time a call.

    They are those of the quarter of the pairs of samples that took least: a host that other tenants use runs at half its
    speed for seconds at a time.
    """
    pairs = [(sample(first, calls), sample(second, calls)) for _ in range(SAMPLES)]
    calm = sorted(pairs, key=sum)[: SAMPLES // 4]
    theirs, ours = zip(*calm, strict=True)
    return statistics.median(theirs), statistics.median(ours), statistics.median(b - a for a, b in calm)


def sample(op: Op, calls: int) -> float:
    """Return the microseconds of this thread's CPU time that a call takes."""
    began = time.thread_time_ns()
    for _ in range(calls):
        op()
    return (time.thread_time_ns() - began) / calls / 1e3


def wall(run: Op) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def page_faults() -> int:
    """Return how many pages this process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


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
