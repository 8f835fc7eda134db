"""Which plots a report has: latency, load, caches, speculation and engines over time, each only where there is data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from npu_statlogger.tools import names
from npu_statlogger.tools.svg import Curve, Plot
from npu_statlogger.tools.text import duration, number

if TYPE_CHECKING:
    from npu_statlogger.tools.notes import Finding
    from npu_statlogger.tools.overview import Overview
    from npu_statlogger.tools.timeline import Span

__all__ = ["plots"]

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_DRAWN_ENGINES = 8
"""As many as there are colours."""

_GENERATED = "tokens generated per second"
_MARKED = {
    "stall": {"between tokens", _GENERATED},
    "preemptions": {"preemptions per minute", "KV cache in use"},
    "hit_rate": {"cache hits"},
    "queue": {"queue", "requests"},
}
"""Kind of finding -> titles of the plots that it is marked in."""

_HARDLY_USED = 0.2
"""A share that stays below this is drawn larger than on a scale up to 1."""

Value = Callable[["Span"], float | None]


def plots(overview: Overview, findings: Sequence[Finding]) -> list[Plot]:
    """Return the plots that have something to show."""
    found = [*_throughput(overview), *_latencies(overview), *_load(overview), *_shares(overview), *_engines(overview)]
    return [
        replace(plot, curves=curves, marks=_marks(plot.title, findings))
        for plot in found
        if (curves := [curve for curve in plot.curves if any(value for value in curve.values)])
    ]


def _throughput(overview: Overview) -> Iterator[Plot]:
    spans = list(overview.timeline)
    generated = Curve("generated", [span.rate(names.GENERATED) for span in spans], 0, area=True)
    yield _plot(overview, _GENERATED, (generated,), number)
    prompts = (
        Curve("computed", [span.rate(names.COMPUTED) for span in spans], 0, area=True),
        Curve("with cached ones", [span.rate("prompt_tokens") for span in spans], 3),
    )
    yield _plot(overview, "prompt tokens per second", prompts, number)


def _latencies(overview: Overview) -> Iterator[Plot]:
    spans = list(overview.timeline)
    for name in (names.TTFT, names.ITL, names.E2E, names.QUEUE):
        curves = [
            Curve(label, [span.quantile(name, q) for span in spans], color)
            for color, (label, q) in enumerate(_PERCENTILES.items())
        ]
        yield _plot(overview, names.label(name), curves, duration)


def _load(overview: Overview) -> Iterator[Plot]:
    spans = list(overview.timeline)
    # A line's mean is that of one engine: the load is the sum of the engines, where all are kept apart.
    apart = len(overview.timelines) == len(overview.whole.engines)
    title = "requests" if apart else "requests, mean of an engine"
    running, waiting = (
        _sum_of_engines(overview, name) if apart else [span.mean(name) for span in spans]
        for name in (names.RUNNING, names.WAITING)
    )
    yield _plot(overview, title, (Curve("running", running, 0, area=True), Curve("waiting", waiting, 1)), number)
    usage = Curve("mean", [span.mean(names.KV_USAGE) for span in spans], 0, area=True)
    top = 1.0 if max((value or 0.0 for value in usage.values), default=0.0) > _HARDLY_USED else None
    yield _plot(overview, names.label(names.KV_USAGE), (usage,), _percent, top=top)
    preempted = Curve("preemptions", [60 * span.rate(names.PREEMPTIONS) for span in spans], 1, area=True)
    yield _plot(overview, "preemptions per minute", (preempted,), number)


def _shares(overview: Overview) -> Iterator[Plot]:
    spans = list(overview.timeline)
    hits = [
        Curve(
            names.label(f"{cache}_hit_rate").removesuffix(" hits"),
            [span.ratio(f"{cache}_hits", f"{cache}_queries") for span in spans],
            color,
        )
        for color, cache in enumerate(names.CACHES)
    ]
    yield _plot(overview, "cache hits", hits, _percent, top=1.0)
    accepted = Curve("accepted", [span.ratio(names.ACCEPTED, names.DRAFTED) for span in spans], 0, area=True)
    yield _plot(overview, names.label("draft_acceptance_rate"), (accepted,), _percent, top=1.0)
    length = Curve("tokens", [span.ratio(names.ACCEPTED, names.DRAFTS) for span in spans], 0, area=True)
    yield _plot(overview, "tokens accepted per draft", (length,), number)


def _engines(overview: Overview) -> Iterator[Plot]:
    """Compare engines, which may have written in different spans, where there are several."""
    if len(overview.timelines) < 2:
        return
    shown = sorted(overview.timelines)[:_DRAWN_ENGINES]
    more = f", the first {len(shown)}" if len(overview.whole.engines) > len(shown) else ""
    values: dict[str, Value] = {
        f"running, by engine{more}": lambda span: span.mean(names.RUNNING),
        f"tokens generated per second, by engine{more}": lambda span: span.rate(names.GENERATED),
    }
    for title, value in values.items():
        curves = [
            Curve(f"engine {engine}", _of_engine(overview, engine, value), color) for color, engine in enumerate(shown)
        ]
        yield _plot(overview, title, curves, number)


def _of_engine(overview: Overview, engine: int, value: Value) -> list[float | None]:
    """Return what one engine had in each of the spans of all."""
    timeline = overview.timelines[engine]
    timeline.coarsen(overview.timeline.width)
    own = {span.start: value(span) for span in timeline}
    return [own.get(span.start) for span in overview.timeline]


def _sum_of_engines(overview: Overview, name: str) -> list[float | None]:
    def mean(span: Span) -> float | None:
        return span.mean(name)

    sums: list[float | None] = []
    for values in zip(*(_of_engine(overview, engine, mean) for engine in overview.timelines), strict=True):
        known = [value for value in values if value is not None]
        sums.append(sum(known) if known else None)
    return sums


def _plot(
    overview: Overview, title: str, curves: Sequence[Curve], unit: Callable[[float], str], top: float | None = None
) -> Plot:
    width = overview.timeline.width
    return Plot(title, [span.start + width / 2 for span in overview.timeline], curves, unit, width, top=top)


def _marks(title: str, findings: Sequence[Finding]) -> list[tuple[float, float, str]]:
    return [(each.start, each.end, each.text) for each in findings if title in _MARKED.get(each.kind, ())]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
