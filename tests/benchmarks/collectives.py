"""npuccl beside gloo in one run, interleaved: ``python -m tests.benchmarks.collectives``.

Two processes run the same collective on npu tensors (npuccl) and on CPU tensors (gloo), in turns; a figure is the median
time of one call in microseconds over all rounds, of the slower rank. "busy" is beside one process that computes without
end, on a machine of few cores; "replay" is the call as a node of a graph of 50, which no Python runs between.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.machine import machine

SIZES = [1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20]
COLLECTIVES = ["all_reduce", "all_gather", "broadcast"]
IN_GRAPH = 50

HEAD = """# Collectives of {ranks} ranks beside gloo

`python -m tests.benchmarks.collectives --page FILE`, which tells what is measured. Machine: {machine}; bfloat16, medians of
{rounds} interleaved rounds, microseconds a call.
"""

Figures = dict[tuple[str, int, str], float]  # (collective, elements, contestant) -> us


def main() -> None:
    """Measure quiet, then beside a busy process, and print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.collectives", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="elements of bfloat16")
    parser.add_argument("--quick", action="store_true", help="three rounds of three sizes")
    parser.add_argument("--page", type=Path, help="file to write the tables into")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sizes = 3, SIZES[::3]
    os.environ |= {
        "NPU_SIMULATOR_DEVICES": str(options.ranks),
        "NPU_SIMULATOR_MEMORY": "1GiB",
        "OMP_NUM_THREADS": "1",
    }
    parts = [HEAD.format(machine=machine(), ranks=options.ranks, rounds=options.rounds)]
    for busy in (False, True):
        figures = measure(options.ranks, options.rounds, options.sizes, busy=busy)
        parts.append(f"## {'Beside a busy process' if busy else 'Quiet'}\n\n{table(figures, options.sizes)}\n")
    text = "\n".join(parts)
    print(text)
    if options.page:
        options.page.write_text(text)


def measure(ranks: int, rounds: int, sizes: list[int], *, busy: bool) -> Figures:
    """Run the ranks and return rank 0's medians."""
    context = multiprocessing.get_context("spawn")
    neighbour = context.Process(target=spin, daemon=True)
    if busy:
        neighbour.start()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, f"{folder}/store", rounds, sizes, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        figures: Figures = results.get(timeout=1800)
        for process in processes:
            process.join()
    if busy:
        neighbour.kill()
    return figures


def rank_main(
    rank: int, size: int, store: str, rounds: int, sizes: list[int], results: multiprocessing.Queue[Figures]
) -> None:
    """Time every case in turns; rank 0 reports."""
    torch.npu.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,npu:npuccl", init_method=f"file://{store}", rank=rank, world_size=size)
    cases = {
        (name, elements, contestant): case
        for name in COLLECTIVES
        for elements in sizes
        for contestant, case in contestants(name, elements, size).items()
    }
    times: dict[tuple[str, int, str], list[float]] = {key: [] for key in cases}
    for _ in range(rounds):
        for key, (calls, run) in cases.items():
            times[key].append(slowest(run, calls))
    if rank == 0:
        results.put({key: statistics.median(each) for key, each in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def contestants(name: str, elements: int, ranks: int) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return for each contestant how many calls one run makes, and the run."""
    calls = max(2, min(50, (1 << 22) // elements))
    graph = torch.npu.NPUGraph()
    eager = call(name, elements, ranks, "npu")
    with torch.npu.graph(graph):
        for _ in range(IN_GRAPH if elements <= 1 << 16 else 2):
            eager()
    return {
        "gloo": (calls, repeat(call(name, elements, ranks, "cpu"), calls)),
        "npuccl": (calls, repeat(eager, calls)),
        "replay": (IN_GRAPH if elements <= 1 << 16 else 2, graph.replay),
    }


def call(name: str, elements: int, ranks: int, device: str) -> Callable[[], object]:
    """Return one call of the collective on tensors of its own."""
    mine = torch.ones(elements, dtype=torch.bfloat16, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(mine)
    if name == "broadcast":
        return lambda: dist.broadcast(mine, 0)
    whole = torch.empty(elements * ranks, dtype=torch.bfloat16, device=device)
    return lambda: dist.all_gather_single(whole, mine)


def repeat(once: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a run of so many calls."""

    def run() -> None:
        for _ in range(calls):
            once()

    return run


def slowest(run: Callable[[], object], calls: int) -> float:
    """Return the time of one call in microseconds on the rank that took longest."""
    run()
    dist.barrier()
    started = time.perf_counter()
    run()
    took = torch.tensor([(time.perf_counter() - started) / calls * 1e6], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def spin() -> None:
    """Compute without end, as a neighbour on the machine does."""
    while os.getppid() != 1:
        sum(range(100_000))


def table(figures: Figures, sizes: list[int]) -> str:
    """Return the medians as a Markdown table."""
    lines = [
        "| collective | elements | gloo us | npuccl us | times faster | in a graph us | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in COLLECTIVES:
        for elements in sizes:
            gloo, eager, replay = (figures[name, elements, who] for who in ("gloo", "npuccl", "replay"))
            lines.append(
                f"| {name} | {elements} | {gloo:.0f} | {eager:.1f} | {gloo / eager:.1f} | {replay:.1f} | {gloo / replay:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
