"""The command npu-stat: one summary of the lines of one or several files, in all and by engine.

Exit codes: 0 done; 1 no whole line found; 2 wrong usage or a file that cannot be read; 141 the reader of the output has
gone, as after `npu-stat summary FILE | head`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.errors import FormatError
from npu_statlogger.reading import read_snapshots
from npu_statlogger.snapshot import QUANTILES, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run npu-stat and return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; what the interpreter flushes when it exits must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports a program that SIGPIPE has ended


def summarise(files: Sequence[Path], *, as_json: bool) -> int:
    """Merge all whole lines of `files` and print the result; damaged lines are counted on stderr."""
    merged, engines, lines = Snapshot(), defaultdict[int, Snapshot](Snapshot), 0
    for path in files:
        try:
            for number, snapshot in enumerate(read_snapshots(path), start=1):
                if isinstance(snapshot, FormatError):
                    print(f"npu-stat: {path}:{number}: left out: {snapshot}", file=sys.stderr)
                    continue
                merged.merge(snapshot)
                if len(snapshot.engines) == 1:
                    engines[next(iter(snapshot.engines))].merge(snapshot)
                lines += 1
        except OSError as error:
            print(f"npu-stat: cannot read {path}: {error.strerror}.", file=sys.stderr)
            return 2
    if not lines:
        print(f"npu-stat: no whole line in {', '.join(map(str, files))}.", file=sys.stderr)
        return 1
    by_engine = dict(sorted(engines.items()))
    if as_json:
        parts = {str(engine): snapshot.to_dict() for engine, snapshot in by_engine.items()}
        print(json.dumps(merged.to_dict() | {"by_engine": parts}))
    else:
        print("\n".join([render(merged, lines), *(["", render_engines(by_engine)] if len(by_engine) > 1 else [])]))
    return 0


def render(snapshot: Snapshot, lines: int) -> str:
    """Return the summary as text: span, rates, counters, one row a distribution."""
    models = ", ".join(sorted(snapshot.models))
    origin = f"{lines} lines, {len(snapshot.processes)} processes, {len(snapshot.engines)} engines"
    rows = [
        f"{origin}, {snapshot.seconds:.1f} s, models: {models}",
        "",
        *(f"{name:34} {value:12.4g}" for name, value in snapshot.rates().items() if value is not None),
        "",
        *(f"{name:34} {value:12d}" for name, value in sorted(snapshot.counters.items())),
        "",
        f"{'':34} {'count':>9} {'mean':>9} " + " ".join(f"{label:>9}" for label in QUANTILES) + f" {'max':>9}",
    ]
    for name, sketch in sorted(snapshot.distributions.items()):
        quantiles = " ".join(f"{sketch.quantile(q):9.4g}" for q in QUANTILES.values())
        rows.append(f"{name:34} {sketch.count:9d} {sketch.mean:9.4g} {quantiles} {sketch.maximum:9.4g}")
    return "\n".join(rows)


def render_engines(engines: dict[int, Snapshot]) -> str:
    """Return a table of the engines: their means and rates, and the sums of these."""
    means, rates = (
        ("num_requests_running", "num_requests_waiting"),
        ("prompt_tokens_computed_per_second", "generation_tokens_per_second"),
    )
    table = [
        [
            *(_or_zero(snapshot.distributions[name].mean) for name in means),
            *(snapshot.rates()[name] or 0.0 for name in rates),
        ]
        for snapshot in engines.values()
    ]
    heads = ("running", "waiting", "computed prompt tokens/s", "generated tokens/s")
    rows = [f"{'engine':8}" + "".join(f" {head:>24}" for head in heads)]
    for label, values in zip(
        [*engines, "sum"], [*table, [sum(column) for column in zip(*table, strict=True)]], strict=True
    ):
        rows.append(f"{label!s:8}" + "".join(f" {value:24.4g}" for value in values))
    return "\n".join(rows)


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="npu-stat", description="Read the statistics that npu-statlogger wrote.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="merge all lines of the files and print one summary")
    summary.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file written by npu-statlogger")
    summary.add_argument("--json", action="store_true", help="print the merged line as JSON, with one for each engine")
    options = parser.parse_args(arguments)
    return summarise(options.files, as_json=options.json)


def _or_zero(mean: float) -> float:
    return 0.0 if math.isnan(mean) else mean


if __name__ == "__main__":
    sys.exit(main())
