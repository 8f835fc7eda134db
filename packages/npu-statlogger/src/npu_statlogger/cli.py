"""The command npu-stat: one summary of the lines of one or several files.

Exit codes: 0 done; 1 no whole line found; 2 wrong usage or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.errors import FormatError
from npu_statlogger.jsonl import read_snapshots
from npu_statlogger.snapshot import QUANTILES, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run npu-stat and return its exit code."""
    parser = argparse.ArgumentParser(prog="npu-stat", description="Read the statistics that npu-statlogger wrote.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="merge all lines of the files and print one summary")
    summary.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file written by npu-statlogger")
    summary.add_argument("--json", action="store_true", help="print the merged line as JSON")
    options = parser.parse_args(arguments)
    return summarise(options.files, as_json=options.json)


def summarise(files: Sequence[Path], *, as_json: bool) -> int:
    """Merge all whole lines of `files` and print the result; damaged lines are counted on stderr."""
    merged = Snapshot()
    lines = 0
    for path in files:
        try:
            for number, snapshot in enumerate(read_snapshots(path), start=1):
                if isinstance(snapshot, FormatError):
                    print(f"npu-stat: {path}:{number}: left out: {snapshot}", file=sys.stderr)
                    continue
                merged.merge(snapshot)
                lines += 1
        except OSError as error:
            print(f"npu-stat: cannot read {path}: {error.strerror}.", file=sys.stderr)
            return 2
    if not lines:
        print(f"npu-stat: no whole line in {', '.join(map(str, files))}.", file=sys.stderr)
        return 1
    print(json.dumps(merged.to_dict()) if as_json else render(merged, lines))
    return 0


def render(snapshot: Snapshot, lines: int) -> str:
    """Return the summary as text: span, rates, counters, one row a distribution."""
    models = ", ".join(sorted(snapshot.models))
    rows = [
        f"{lines} lines, {len(snapshot.processes)} processes, {snapshot.seconds:.1f} s, models: {models}",
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


if __name__ == "__main__":
    sys.exit(main())
