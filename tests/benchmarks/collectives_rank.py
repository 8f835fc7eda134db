"""A rank of :mod:`tests.benchmarks.collectives` with npu tensors (npuccl) and CPU tensors (gloo): RANK RANKS FOLDER."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from npu_platform.distributed.communicator import NPUCommunicator

Run = tuple[int, Callable[[], None]]
"""So many calls of a collective, and what makes them."""


def main(rank: int, size: int, folder: str) -> None:
    """Join the others, then do what each line of the input asks for and answer with the microseconds of a call."""
    torch.npu.set_device(rank)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("cpu:gloo,npu:npuccl", init_method=store, rank=rank, world_size=size)
    take_a_core(rank)
    for line in sys.stdin:
        asked = json.loads(line)
        took = 0.0 if asked == "join" else timed(*prepared(*asked, size))
        print(f"ANSWER {took}", flush=True)


def take_a_core(rank: int) -> None:
    """Run on one core alone, as the ranks of an engine do: two that the system has put on one stay there."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


@functools.cache
def prepared(name: str, elements: int, contestant: str, ranks: int) -> Run:
    """Return a run of the collective, on tensors of its own."""
    once = call(name, elements, ranks, "cpu" if contestant == "gloo" else "npu")
    calls = max(2, min(50, (1 << 22) // elements))
    if contestant != "replay":
        return calls, repeat(once, calls)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(calls):
            once()
    return calls, graph.replay


def call(name: str, elements: int, ranks: int, device: str) -> Callable[[], object]:
    """Return one call of the collective."""
    mine = torch.ones(elements, dtype=torch.bfloat16, device=device)
    if name == "all_reduce" and device == "npu":
        return functools.partial(communicator().all_reduce, mine)
    if name == "all_reduce":
        return lambda: dist.all_reduce(mine)
    if name == "broadcast":
        return lambda: dist.broadcast(mine, 0)
    whole = torch.empty(elements * ranks, dtype=torch.bfloat16, device=device)
    if name == "all_gather" and device == "npu":
        return functools.partial(communicator().all_gather_into, whole, mine)
    return lambda: dist.all_gather_single(whole, mine)


@functools.cache
def communicator() -> NPUCommunicator:
    """Return what vLLM calls for its tensor-parallel group."""
    return NPUCommunicator(dist.group.WORLD, torch.device("npu"), dist.group.WORLD)


def repeat(once: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a run of so many calls."""

    def run() -> None:
        for _ in range(calls):
            once()

    return run


def timed(calls: int, run: Callable[[], None]) -> float:
    """Return the time of one call in microseconds, after a run that is not counted."""
    run()
    communicator().all_reduce(torch.ones(1, device="npu"))
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) / calls * 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
