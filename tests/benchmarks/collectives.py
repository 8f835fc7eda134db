"""npuccl beside gloo and vLLM CPU's shared memory in one run, in turns: ``nox -s bench -- collectives``.

Two processes run the same collective on npu tensors (npuccl; all-reduce and all-gather as vLLM asks for them, by
``NPUCommunicator``) and on CPU tensors (gloo); with ``--peer-python`` two more, in
an environment with vLLM's CPU build, call what its communicator calls (``shm_allreduce``, ``shm_all_gather``). A figure is
the median over the rounds of the time of one call in microseconds, of the slower rank. "busy" is beside one process that
computes without end, on a machine of few cores; "replay" is the call as a node of a graph, which no Python runs between.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.machine import commit, machine

SIZES = [1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20]
COLLECTIVES = ["all_reduce", "all_gather", "broadcast"]
OWN = ["gloo", "npuccl", "replay"]
PEER = "vLLM CPU"
OF_THE_PEER = COLLECTIVES[:2]
HERE = Path(__file__).parent

HEAD = """# Collectives of {ranks} ranks

`{command}` tells what is measured. {date} UTC, commit {commit}. Machine: {machine}; bfloat16, medians of {rounds} rounds in turns, microseconds a call.
"""

Figures = dict[tuple[str, int, str], float]  # (collective, elements, contestant) -> us


def main() -> None:
    """Measure quiet, then beside a busy process, and print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.collectives", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="rounds in turns (default 11)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="elements of bfloat16")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--neighbours", nargs="+", choices=["quiet", "busy"], default=["quiet", "busy"])
    parser.add_argument("--quick", action="store_true", help="three rounds of three sizes")
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--page", type=Path, help="file to write the tables into")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.sizes = 3, SIZES[::3]
    told = {"command": "python -m tests.benchmarks.collectives", "commit": commit(), "machine": machine()}
    told |= {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    parts = [HEAD.format(ranks=options.ranks, rounds=options.rounds, **told)]
    for neighbour in options.neighbours:
        with busy() if neighbour == "busy" else contextlib.nullcontext():
            figures = measure(options)
        title = "Beside a busy process" if neighbour == "busy" else "Quiet"
        parts.append(f"## {title}\n\n{table(figures, options)}\n")
    text = "\n".join(parts)
    print(text)
    if options.page:
        options.page.write_text(text)


def measure(options: argparse.Namespace) -> Figures:
    """Let all contestants do each case in turns, and return the medians."""
    times: dict[tuple[str, int, str], list[float]] = {}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        ours = stack.enter_context(ranks([sys.executable, "-m", "tests.benchmarks.collectives_rank"], folder, options))
        who = dict.fromkeys(OWN, ours)
        if options.peer_python:
            command = [options.peer_python, str(HERE / "collectives_peer.py")]
            who[PEER] = stack.enter_context(ranks(command, folder, options))
        for _ in range(options.rounds):
            for name in options.collectives:
                for elements in options.sizes:
                    for contestant, processes in who.items():
                        if contestant != PEER or name in OF_THE_PEER:
                            took = ask(processes, [name, elements, contestant])
                            times.setdefault((name, elements, contestant), []).append(took)
    return {case: statistics.median(each) for case, each in times.items()}


@contextlib.contextmanager
def ranks(command: list[str], folder: str, options: argparse.Namespace) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the ranks of a contestant, each of which does what it is asked on its input, and yield them when all are up."""
    environ = os.environ | {
        "NPU_SIMULATOR_DEVICES": str(options.ranks),
        "NPU_SIMULATOR_MEMORY": "1GiB",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(options.ranks), folder],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(options.ranks)
    ]
    try:
        ask(processes, "join")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ask(processes: list[subprocess.Popen[str]], what: object) -> float:
    """Ask all ranks for the same and return the largest of their answers."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()
    return max(answer(process) for process in processes)


def answer(process: subprocess.Popen[str]) -> float:
    """Return what a rank answers; lines of its libraries are passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ANSWER "):
            return float(line.removeprefix("ANSWER "))
    msg = f"a rank ended: {process.args}"
    raise RuntimeError(msg)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Run a process that computes without end, as a neighbour on the machine does."""
    neighbour = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    neighbour.start()
    try:
        yield
    finally:
        neighbour.kill()


def spin() -> None:
    """Compute until the parent is gone."""
    while os.getppid() != 1:
        sum(range(100_000))


def table(figures: Figures, options: argparse.Namespace) -> str:
    """Return the medians as a Markdown table, with how many times faster npuccl is than the fastest of the others."""
    peers = [name for name in ("gloo", PEER) if any(case[2] == name for case in figures)]
    lines = [
        f"| collective | elements | {' us | '.join(peers)} us | npuccl us | times faster | in a graph us | times faster |",
        f"|---|---|{'---|' * len(peers)}---|---|---|---|",
    ]
    for name in options.collectives:
        for elements in options.sizes:
            theirs = [figures.get((name, elements, peer)) for peer in peers]
            best = min(each for each in theirs if each is not None)
            eager, replay = (figures[name, elements, who] for who in OWN[1:])
            cells = ["-" if each is None else f"{each:.1f}" for each in theirs]
            cells += [f"{eager:.1f}", f"{best / eager:.2f}", f"{replay:.1f}", f"{best / replay:.2f}"]
            lines.append(f"| {name} | {elements} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
