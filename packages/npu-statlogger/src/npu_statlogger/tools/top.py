"""`npu-stat top`: what a server does now, in the terminal, from the files that it writes."""

from __future__ import annotations

import argparse
import io
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.errors import InputError
from npu_statlogger.lines import Line, Note
from npu_statlogger.sketch import Sketch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.arguments import refuse_without, seconds, write_text
from npu_statlogger.tools.follow import Follower, time_of
from npu_statlogger.tools.notes import Finding, find
from npu_statlogger.tools.source import no_lines
from npu_statlogger.tools.text import clock, duration, figure, sparkline
from npu_statlogger.tools.timeline import Span, Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from npu_statlogger.tools.arguments import Commands

__all__ = ["Window", "add", "render"]

_SLOTS = 60
_STALE = 3.0
"""Lengths of a line without a new one after which the server counts as silent."""

_ENGINES = 16
_NOTES = 6
_LABEL, _CELL = 24, 8
"""Widths of columns: of labels, and of figures at least."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("top", help="what a server does now, live in the terminal (needs rich)")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that npu-statlogger writes")
    parser.add_argument("--window", type=seconds, default=600.0, metavar="TIME", help="time to look back on (10min)")
    parser.add_argument("--every", type=seconds, default=1.0, metavar="TIME", help="time between two looks (1s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write one picture as SVG and end")
    parser.set_defaults(run=_run)


class Window:
    """The last `length` seconds of all files; memory does not grow with the time that it is watched."""

    def __init__(self, length: float) -> None:
        self.length = length
        self.models: set[str] = set()
        self.last = 0.0
        self.line_seconds = 0.0
        self.notes: list[Note] = []
        self.timeline = Timeline(_SLOTS * 2, names.LATENCIES, names.LOAD, width=length / _SLOTS)
        self.engines: dict[int, Timeline] = {}
        self._forgotten = 0.0

    def add(self, line: Line) -> None:
        """Take in a line."""
        if isinstance(line, Note):
            self.notes = [*self.notes, line][-_NOTES:]
        if not isinstance(line, Snapshot) or line.end < self.last - self.length:
            return
        if time_of(line) > self.last:
            self.last, self.line_seconds = line.end, line.seconds
        self.models |= line.models
        self.timeline.add(line)
        for engine in line.engines:
            if engine in self.engines or len(self.engines) < _ENGINES:
                timeline = self.engines.setdefault(engine, Timeline(_SLOTS * 2, (), names.LOAD, self.timeline.width))
                timeline.add(line)
        if self.last >= self._forgotten + self.timeline.width:
            self._forgotten = self.last
            for timeline in (self.timeline, *self.engines.values()):
                timeline.forget(self.last - self.length)

    def findings(self) -> list[Finding]:
        """Return what is out of the ordinary, the latest last."""
        engines = {engine: list(timeline) for engine, timeline in self.engines.items()}
        found = find(list(self.timeline), engines, Snapshot())
        found += [Finding(note.name, note.time, note.time, note.text) for note in self.notes]
        return sorted(found, key=lambda finding: finding.start)[-_NOTES:]


def render(window: Window, now: float, width: int) -> RenderableType:
    """Return the picture for `width` columns: a head, rates and load, latencies, engines, notes."""
    from rich.console import Group
    from rich.text import Text

    age = max(now - window.last, 0.0)
    silent = age > _STALE * max(window.line_seconds, 1.0)
    head = Text.assemble(
        (" ".join(sorted(window.models)) or "no line yet", "bold"), f"   last {duration(window.length)}"
    )
    if window.last:
        said = f"   last line {duration(age)} ago" + (": silent" if silent else "")
        head.append(said, "bold red" if silent else "dim")
    spans = list(window.timeline)
    parts: list[RenderableType] = [head, "", _load(window, spans, width), "", _latencies(window, spans, width)]
    if len(window.engines) > 1:
        parts += ["", _engines(window, width)]
    findings = window.findings()
    if findings:
        parts += ["", Text("Out of the ordinary", style="bold")]
        parts += [Text(f"{clock(each.start, day=False)}  {each.text}", style="yellow") for each in findings]
    return Group(*parts)


def _run(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        refuse_without("rich", "top", error)
    followers, window = [Follower(path) for path in options.files], Window(max(options.window, 1.0))
    if (options.once or options.svg) and not any(follower.has_lines() for follower in followers):
        raise no_lines(options.files)
    for follower in followers:
        follower.back(1)
        last = max(map(time_of, follower.poll()), default=0.0)
        follower.back_to(last - window.length)
    _take(window, followers)
    if options.svg:
        console = Console(record=True, width=116, file=io.StringIO(), force_terminal=True)
        console.print(render(window, window.last, console.width))
        # Without the font that rich would load from elsewhere.
        picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="npu-stat top"), flags=re.DOTALL)
        write_text(options.svg, picture)
        return 0
    console = Console()
    if options.once:
        with console.capture() as captured:  # rich itself would end the process where nobody reads on
            console.print(render(window, time.time(), console.width))
        print(captured.get(), end="")
        return 0
    if not console.is_terminal:
        msg = "`npu-stat top` needs a terminal; use `npu-stat top --once` or `npu-stat tail -f`."
        raise InputError(msg)
    with Live(render(window, time.time(), console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.every)
            _take(window, followers)
            live.update(render(window, time.time(), console.width), refresh=True)


def _take(window: Window, followers: Sequence[Follower]) -> None:
    for follower in followers:
        for line in follower.poll():
            window.add(line)


def _load(window: Window, spans: Sequence[Span], width: int) -> Table:
    """Rates and load: now, on average, and over the window."""
    table = _grid("", "now", "mean", "")
    apart = list(window.engines.values())
    rows: list[tuple[str, str, list[float | None]]] = [
        ("tokens generated", "_per_second", [span.rate(names.GENERATED) for span in spans]),
        ("prompt tokens computed", "_per_second", [span.rate(names.COMPUTED) for span in spans]),
        ("requests finished", "_per_second", [_finished(span) for span in spans]),
        *((names.label(name), name, _sums(spans, apart, name)) for name in (names.RUNNING, names.WAITING)),
        (names.label(names.KV_USAGE), "_rate", [span.mean(names.KV_USAGE) for span in spans]),
        *(
            (
                names.label(f"{cache}_hit_rate"),
                "_rate",
                [span.ratio(f"{cache}_hits", f"{cache}_queries") for span in spans],
            )
            for cache in names.CACHES
        ),
        ("drafted tokens accepted", "_rate", [span.ratio(names.ACCEPTED, names.DRAFTED) for span in spans]),
        ("preemptions", "_per_second", [span.rate(names.PREEMPTIONS) for span in spans]),
    ]
    for label, unit, values in rows:
        known = [value for value in values if value is not None]
        if known and (any(known) or label in ("running", "waiting")):
            cells = (figure(unit, known[-1]), figure(unit, sum(known) / len(known)))
            top = 1.0 if unit == "_rate" else None
            table.add_row(label, *cells, _line(window.timeline, values, _bars(width, 2), top))
    return table


def _latencies(window: Window, spans: Sequence[Span], width: int) -> Table:
    """Percentiles of the window, and the 99th over time."""
    table = _grid("", "p50", "p90", "p99", "p99 now", "p99 over time")
    for name in names.LATENCIES:
        whole = Sketch()
        for span in spans:
            if name in span.sketches:
                whole.merge(span.sketches[name])
        if whole.count:
            p99 = [span.quantile(name, 0.99) for span in spans]
            cells = [duration(whole.quantile(q)) for q in (0.5, 0.9, 0.99)]
            table.add_row(
                names.label(name), *cells, figure(name, _latest(p99)), _line(window.timeline, p99, _bars(width, 4))
            )
    return table


def _engines(window: Window, width: int) -> Table:
    table = _grid("", "running", "waiting", "KV cache", "tokens/s", "tokens/s over time")
    for engine, timeline in sorted(window.engines.items()):
        spans = list(timeline)
        rates = [span.rate(names.GENERATED) for span in spans]
        cells = [figure(name, _latest([span.mean(name) for span in spans])) for name in names.LOAD]
        table.add_row(f"engine {engine}", *cells, figure("", _latest(rates)), _line(timeline, rates, _bars(width, 4)))
    return table


def _line(timeline: Timeline, values: Sequence[float | None], cells: int, top: float | None = None) -> str:
    return sparkline([span.start for span in timeline], values, cells, top=top, span=timeline.width)


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _grid(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, head in enumerate(heads):
        last = index == len(heads) - 1
        justify = "left" if index == 0 or last else "right"
        style = "cyan" if last else ("" if index else "bold")
        least = _LABEL if index == 0 else (None if last else _CELL)
        table.add_column(head, justify=justify, style=style, no_wrap=True, min_width=least)  # type: ignore[arg-type]
    return table


def _bars(width: int, cells: int) -> int:
    """Return how many characters are left for bars beside a label and some figures."""
    return max(8, min(_SLOTS, width - _LABEL - cells * (_CELL + 2) - 4))


def _finished(span: Span) -> float:
    count = sum(amount for name, amount in span.amounts.items() if name.startswith(names.FINISHED))
    return count / span.seconds if span.seconds > 0 else 0.0


def _sums(spans: Sequence[Span], engines: Sequence[Timeline], name: str) -> list[float | None]:
    """Return the sum over engines of a load that each line holds for one engine."""
    by_start: list[dict[float, float | None]] = [{span.start: span.mean(name) for span in each} for each in engines]
    sums: list[float | None] = []
    for span in spans:
        known = [value for each in by_start if (value := each.get(span.start)) is not None]
        sums.append(sum(known) if known else None)
    return sums
