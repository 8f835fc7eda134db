"""Every tier of this processor's kernels beside the tier below it: ``nox -s bench -- tiers`` writes tiers.json and tiers.md.

A process for each tier, forced by ``NPU_ISA``, lives as long as the run. They take turns within each case of
``tests.benchmarks.kernels``, every other round the other way round; a round's figure is its best sample, the table holds the
medians of the rounds. A tier that is slower than the one below it by more than the noise of one machine is named.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks import pages
from tests.benchmarks.kernel_cases import CASES, Case
from tests.benchmarks.kernels import CONTESTANT, Contestant, cores
from tests.benchmarks.machine import facts
from tests.benchmarks.results import abba

NOISE = 0.02
"""Of a time: differences below it are not told from none."""


def main() -> None:
    """Run the rounds, print the table and keep the figures."""
    options = parse()
    environ = {
        "OMP_NUM_THREADS": str(options.threads),
        "NPU_NUM_THREADS": str(options.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-m", CONTESTANT, "npu"]
    tiers = {name: Contestant(command, environ | {"NPU_ISA": name, "NPU_TUNE": "0"}) for name in options.tiers}
    chosen = [case for case in CASES if re.search(options.only, case.name)]
    cases = []
    for case in chosen:
        cases.append(measured(case, tiers, options))
        print(row(cases[-1], options.tiers), file=sys.stderr, flush=True)
    for tier in tiers.values():
        tier.stop()
    record = {"suite": "tiers", "machine": facts(), "threads": options.threads, "tiers": options.tiers, "cases": cases}
    print(table(record))
    if options.results or not options.only:
        keep(record, Path(options.results or pages.folder()))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    from npu_ops import native

    there = [name for name in native.isas() if name != "scalar" and native.can_run(name)]
    parser = argparse.ArgumentParser(prog="tests.benchmarks.tiers", description=__doc__)
    parser.add_argument(
        "--tiers", nargs="+", choices=native.isas(), default=there, help="from the lowest to the highest"
    )
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds (default 2)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each; with 1, the thread's own time counts")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a tier's turn (default 0.05)")
    parser.add_argument("--results", help="folder for tiers.json and its page (default: docs/benchmarks/MACHINE)")
    return parser.parse_args()


def measured(case: Case, tiers: dict[str, Contestant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the case and the seconds a call of every tier and round."""
    seconds: dict[str, list[float]] = {name: [] for name in tiers}
    for number in range(options.rounds):
        for name in abba(list(tiers), number):
            answer = tiers[name].time(case.name, options.seconds)
            if isinstance(answer, str):
                msg = f"{case.name} does not run in the tier {name}: {answer}"
                raise RuntimeError(msg)  # noqa: TRY004 - an answer in words is the process's failure, not a wrong type
            seconds[name].append(answer)
    return {"name": case.name, **asdict(case), "seconds": seconds}


def keep(record: dict[str, Any], folder: Path) -> None:
    """Write the figures of every round, and the table into the machine's page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiers.json").write_text(json.dumps(record) + "\n")
    pages.insert(folder / "tiers.md", "tiers", table(record), f"Tiers on {record['machine']['processor']}")


def table(record: dict[str, Any]) -> str:
    """Return what was measured, who is slower than the tier below, and every case."""
    about, tiers = record["machine"], record["tiers"]
    slower = [name for case in record["cases"] for name in slower_than_below(case, tiers)]
    head = (
        f"{about['date']}, commit {about['commit']}, {about['processor']}, threads: {record['threads']}. Microseconds; in brackets "
        f"how many times as fast as the tier below. Slower than that by more than {NOISE:.0%}: {len(slower)} of "
        f"{len(record['cases']) * (len(tiers) - 1)}, in bold."
    )
    lines = ["| kernel | " + " | ".join(tiers) + " |", "|---" * (len(tiers) + 1) + "|"]
    return "\n".join([head, "", *lines, *(row(case, tiers) for case in record["cases"])])


def row(case: dict[str, Any], tiers: list[str]) -> str:
    """Return a line of the table."""
    slower, cells, below = slower_than_below(case, tiers), [], None
    for name in tiers:
        took = statistics.median(case["seconds"][name])
        times = "" if below is None else f" ({below / took:.2f})"
        cells.append(f"{took * 1e6:.0f}" + (f" **{times.strip()}**" if name in slower else times))
        below = took
    return f"| {case['kernel']} {case['label']} | " + " | ".join(cells) + " |"


def slower_than_below(case: dict[str, Any], tiers: list[str]) -> list[str]:
    """Return the tiers that take longer than the one below them."""
    took = {name: statistics.median(case["seconds"][name]) for name in tiers}
    return [name for below, name in pairwise(tiers) if took[name] > took[below] * (1 + NOISE)]


if __name__ == "__main__":
    main()
