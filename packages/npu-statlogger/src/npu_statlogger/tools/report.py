"""`npu-stat report`: a run on one page, in the terminal or as an HTML file, with what a client measured beside it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_statlogger.lines import Note, RequestLine
from npu_statlogger.snapshot import QUANTILES, Snapshot
from npu_statlogger.tools import bench, names
from npu_statlogger.tools.arguments import add_files, write_text
from npu_statlogger.tools.beside import Client, beside
from npu_statlogger.tools.charts import plots
from npu_statlogger.tools.overview import Overview
from npu_statlogger.tools.page import Section, page
from npu_statlogger.tools.source import Reading, open_error
from npu_statlogger.tools.text import clock, duration, figure, number, sparkline, table

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands
    from npu_statlogger.tools.svg import Plot

__all__ = ["add"]

_BARS = 60


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("report", help="a run on one page: in the terminal, or as an HTML file")
    add_files(parser)
    parser.add_argument("--html", type=Path, metavar="OUT", help="write an HTML file that needs nothing else")
    parser.add_argument("--title", default="", help="the page's title")
    parser.add_argument("--json", action="store_true", help="print JSON: the merged line, what is odd, the series")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    overview, clients, left_out = _read(options.files)
    if options.json:
        print(json.dumps(_data(overview, left_out)))
    elif options.html:
        write_text(options.html, _html(overview, clients, left_out, options.title))
        print(f"npu-stat: {options.html} is written.", file=sys.stderr)
    else:
        print("\n".join(_text(overview, clients)))
    return 0


def _read(files: Sequence[Path]) -> tuple[Overview, list[Client], dict[str, int]]:
    """Read lines into an overview; results of a client stand beside them, or are it where there are no lines."""
    try:
        results = [file for file in files if bench.is_result(file)]
        clients = [Client(result) for file in results for result in bench.read_results(file)]
    except OSError as error:
        raise open_error(error) from error
    lines = [file for file in files if file not in results]
    reading, overview = Reading(lines or results), Overview()
    for line in reading:
        if isinstance(line, Snapshot):
            overview.add(line)
            for client in clients if lines else ():
                client.add(line)
        elif isinstance(line, RequestLine):
            overview.add_request(line)
        elif isinstance(line, Note):
            overview.add_note(line)
    reading.need_intervals()
    return overview, clients, dict(reading.left_out)


def _data(overview: Overview, left_out: dict[str, int]) -> dict[str, Any]:
    return {
        "whole": overview.whole.to_dict(),
        "by_engine": {str(engine): snapshot.to_dict() for engine, snapshot in sorted(overview.engines.items())},
        "findings": [asdict(finding) for finding in overview.findings()],
        "series": {
            plot.title: {"time": list(plot.times)} | {curve.label: list(curve.values) for curve in plot.curves}
            for plot in plots(overview, ())
        },
        "left_out": left_out,
    }


def _html(overview: Overview, clients: Sequence[Client], left_out: dict[str, int], title: str) -> str:
    findings = overview.findings()
    lost = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
    footer = (
        f"npu-stat {version('npu-statlogger')}. Times are UTC. A percentile lies within 1 % of the value at its rank."
        + (f" Lines left out: {lost}." if lost else "")
    )
    shown = title or " ".join(sorted(overview.whole.models)) or "vLLM"
    tables = list(_tables(overview, clients))
    return page(shown, _origin(overview), list(_cards(overview)), findings, plots(overview, findings), tables, footer)


def _text(overview: Overview, clients: Sequence[Client]) -> Iterator[str]:
    yield from (" ".join(sorted(overview.whole.models)), *_origin(overview), "")
    yield from table(("", "", ""), list(_cards(overview)))[1:]
    findings = overview.findings()
    if findings:
        yield from ("", "Out of the ordinary:")
        yield from (f"  {clock(finding.start)}  {finding.text}" for finding in findings)
    yield from ("", "Over time:")
    yield from _sparklines(plots(overview, ()))
    for title, heads, rows in _tables(overview, clients):
        yield from ("", f"{title}:", *table(heads, rows))


def _sparklines(shown: Sequence[Plot]) -> Iterator[str]:
    rows = []
    for plot in shown:
        for curve in plot.curves:
            if not curve.faint and curve.label != "p90":
                top = max(value for value in curve.values if value is not None)
                rows.append(
                    (
                        plot.title,
                        curve.label,
                        sparkline(plot.times, curve.values, _BARS, top=plot.top, span=plot.span),
                        f"max {plot.unit(top)}",
                    )
                )
    yield from table(("", "", "", ""), rows, left=3)[1:]


def _origin(overview: Overview) -> list[str]:
    whole = overview.whole
    counts = [(len(whole.engines), "engine"), (len(whole.processes), "process"), (overview.lines, "line")]
    parts = [
        f"{count} {word}{'' if count == 1 else 'es' if word.endswith('ss') else 's'}" for count, word in counts if count
    ]
    return [f"{clock(whole.start)} to {clock(whole.end)} UTC ({duration(whole.seconds)}), {', '.join(parts)}"]


def _cards(overview: Overview) -> Iterator[tuple[str, str, str]]:
    """Yield the figures that one asks for first: a label, the figure, and what goes with it."""
    whole, rates = overview.whole, overview.whole.rates()
    count = names.finished(whole.counters)
    per_second = number(count / whole.seconds) if whole.seconds else "-"
    yield "requests finished", number(count), f"{per_second}/s"
    yield (
        "tokens generated",
        figure("generation_tokens_per_second", rates["generation_tokens_per_second"]),
        (f"{number(whole.counters[names.GENERATED])} in all"),
    )
    for name in (names.TTFT, names.ITL, names.E2E):
        sketch = whole.distributions.get(name)
        if sketch is not None and sketch.count:
            yield f"{names.label(name)}, p50", duration(sketch.quantile(0.5)), f"p99 {duration(sketch.quantile(0.99))}"
    for name in ("prefix_cache_hit_rate", "external_prefix_cache_hit_rate", "draft_acceptance_rate"):
        if rates[name] is not None:
            yield names.label(name), figure(name, rates[name]), ""
    failed = whole.counters[f"{names.FINISHED}error"]
    for label, many in (("preemptions", whole.counters[names.PREEMPTIONS]), ("requests failed", failed)):
        if many:
            yield label, number(many), ""


def _tables(overview: Overview, clients: Sequence[Client]) -> Iterator[Section]:
    whole = overview.whole
    if clients:
        yield beside(clients)
    heads = ("", "count", "mean", *QUANTILES, "max")
    known = [*names.LATENCIES, *names.LOAD]
    order = sorted(whole.distributions, key=lambda name: (known.index(name) if name in known else len(known), name))
    rows = [
        (
            names.label(name),
            f"{sketch.count:,}",
            *(
                figure(name, value)
                for value in (sketch.mean, *map(sketch.quantile, QUANTILES.values()), sketch.maximum)
            ),
        )
        for name in order
        if (sketch := whole.distributions[name]).count
    ]
    yield "Distributions", heads, rows
    if len(overview.engines) > 1:
        yield _by_engine(overview)
    if overview.slowest():
        yield _slowest(overview)
    positions = _by_position(whole)
    if positions:
        yield "Drafts, by position", ("position", "accepted"), positions
    counted = [(name, f"{count:,}") for name, count in sorted(whole.counters.items()) if count]
    yield (
        "Counters",
        ("", "in all"),
        counted + [(name, number(whole.total(name))) for name in sorted(whole.totals_nano)],
    )
    gauges = sorted({name for engine in whole.gauges.values() for name in engine})
    if gauges:
        heads = ("", *(f"engine {engine}" if engine else "no engine" for engine in sorted(whole.gauges)))
        latest = [(name, *(_latest(whole, name, engine) for engine in sorted(whole.gauges))) for name in gauges]
        yield "Gauges at the end", heads, latest


def _by_position(whole: Snapshot) -> list[tuple[str, str]]:
    """Return for each position of a draft which part of the drafts was accepted there."""
    prefix, drafts = "spec_decode_num_accepted_tokens_per_pos.", whole.counters[names.DRAFTS]
    found = {int(name.removeprefix(prefix)): count for name, count in whole.counters.items() if name.startswith(prefix)}
    return [(str(position), figure("_rate", count / drafts)) for position, count in sorted(found.items()) if drafts]


def _latest(whole: Snapshot, name: str, engine: str) -> str:
    known = whole.gauges[engine].get(name)
    return "-" if known is None else figure(name, known[1])


def _slowest(overview: Overview) -> Section:
    """Return where the time of the slowest requests went, of those that have a line."""
    heads = ("arrival", "end", "prompt", "cached", "answer", "queue", "prefill", "decode", "in all", "preempted")
    rows = [
        (
            clock(line.arrival),
            line.finish_reason,
            *(number(tokens) for tokens in (line.prompt_tokens, line.cached_tokens, line.generation_tokens)),
            *map(duration, (line.queue_seconds, line.prefill_seconds, line.decode_seconds, line.e2e_seconds)),
            number(line.preemptions),
        )
        for line in overview.slowest()
    ]
    return "The slowest requests", heads, rows


def _by_engine(overview: Overview) -> Section:
    rows = []
    for engine, snapshot in sorted(overview.engines.items()):
        rates, spread = snapshot.rates(), snapshot.distributions
        rows.append(
            (
                f"engine {engine}",
                *(figure(name, spread[name].mean) for name in names.LOAD),
                figure("_per_second", rates["generation_tokens_per_second"]),
                *(figure(name, spread[name].quantile(0.99)) for name in (names.TTFT, names.ITL)),
                number(snapshot.counters[names.PREEMPTIONS]),
            )
        )
    more = len(overview.whole.engines) - len(rows)
    heads = ("", "running", "waiting", "KV cache", "tokens/s", "first token p99", "between tokens p99", "preemptions")
    return f"Engines{f', {more} more in the sums alone' if more else ''}", heads, rows
