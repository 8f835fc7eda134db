"""A rank of :mod:`tests.benchmarks.collectives` in an environment with vLLM's CPU build: RANK RANKS FOLDER.

It calls what ``vllm.distributed.device_communicators.cpu_communicator`` calls for its tensor-parallel group.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def main(rank: int, size: int, folder: str) -> None:
    """Join the others, then do what each line of the input asks for and answer with the microseconds of a call."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as the ranks of an engine do
    load_kernels()
    name = f"{Path(folder).name}-cpushm"
    handle = torch.ops._C.init_shm_manager(name, size, rank, 1)
    (Path(folder) / f"peer-{rank}").touch()
    for line in sys.stdin:
        asked = json.loads(line)
        took = 0.0
        if asked == "join":
            while len(list(Path(folder).glob("peer-*"))) < size:
                time.sleep(0.01)
            torch.ops._C.join_shm_manager(handle, name)
        else:
            took = timed(handle, *prepared(handle, *asked[:2], size))
        print(f"ANSWER {took}", flush=True)


def load_kernels() -> None:
    """Load vLLM's kernels for this processor; those without AVX-512 have no shared memory."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    library = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(f"{spec.submodule_search_locations[0]}/{library}.abi3.so")


@functools.cache
def prepared(handle: int, name: str, elements: int, ranks: int) -> tuple[int, Callable[[], None]]:
    """Return how many calls of the collective a run makes, and the run."""
    mine = torch.ones(elements, dtype=torch.bfloat16)
    whole = torch.empty(elements * ranks, dtype=torch.bfloat16)
    calls = max(2, min(50, (1 << 22) // elements))

    def run() -> None:
        for _ in range(calls):
            if name == "all_reduce":
                torch.ops._C.shm_allreduce(handle, mine)
            else:
                torch.ops._C.shm_all_gather(handle, mine, whole)

    return calls, run


def timed(handle: int, calls: int, run: Callable[[], None]) -> float:
    """Return the time of one call in microseconds, after a run that is not counted."""
    run()
    torch.ops._C.shm_allreduce(handle, torch.ones(1))
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) / calls * 1e6


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
