"""`npu-stat summary`: all lines of the files merged into one, in all and by engine."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING

from npu_statlogger.snapshot import QUANTILES, Snapshot
from npu_statlogger.tools.arguments import add_files
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands

__all__ = ["add", "render", "render_engines"]


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("summary", help="merge all lines of the files and print one summary")
    add_files(parser)
    parser.add_argument("--json", action="store_true", help="print the merged line as JSON, with one for each engine")
    parser.set_defaults(run=_run)


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
    means = ("num_requests_running", "num_requests_waiting")
    rates = ("prompt_tokens_computed_per_second", "generation_tokens_per_second")
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


def _run(options: argparse.Namespace) -> int:
    reading, merged, engines = Reading(options.files), Snapshot(), defaultdict[int, Snapshot](Snapshot)
    for snapshot in reading.snapshots():
        merged.merge(snapshot)
        if len(snapshot.engines) == 1:
            engines[next(iter(snapshot.engines))].merge(snapshot)
    by_engine = dict(sorted(engines.items()))
    if options.json:
        parts = {str(engine): snapshot.to_dict() for engine, snapshot in by_engine.items()}
        print(json.dumps(merged.to_dict() | {"by_engine": parts, "left_out": dict(reading.left_out)}))
    else:
        print(render(merged, reading.kinds["interval"]))
        if len(by_engine) > 1:
            print("\n" + render_engines(by_engine))
    return 0


def _or_zero(mean: float) -> float:
    return 0.0 if math.isnan(mean) else mean
