"""What in a run is out of the ordinary: stalls, storms of preemptions, caches that stop to hit, lost records.

Each is found from the spans of a timeline, against what is ordinary in the same run, so that no limit has to be set
for a model or a machine. The limits below say what is too far from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from npu_statlogger.tools import names
from npu_statlogger.tools.text import duration, number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from npu_statlogger.snapshot import Snapshot
    from npu_statlogger.tools.timeline import Span

__all__ = ["Finding", "find"]

_STALL_GAP = 20.0
"""A step took this many times the median time between tokens ..."""

_STALL_SECONDS = 1.0
"""... and at least this long."""

_SILENCE_SECONDS = 5.0
"""Requests ran for so long and no token came; a long prompt may well take some seconds."""

_STORM_SHARE = 0.25
"""Preemptions for each finished request, and at least _STORM_COUNT in a span."""

_STORM_COUNT = 5
_HIT_FALL = 0.5
"""Part of the ordinary hit rate that is left, where at least _HIT_SHARE had hit and _HIT_QUERIES were asked."""

_HIT_SHARE = 0.1
_HIT_QUERIES = 200
_QUEUE_GROWTH = 4.0
"""Requests wait this many times longer than they ordinarily do, and more wait than run."""

_SPANS_KNOWN = 6
"""Spans that are needed to know what is ordinary."""

_LOST = {
    "records_dropped": "records of steps were dropped, for the logger did not keep up: counters are too low",
    "records_failed": "records of steps could not be read: this vLLM is not one that the logger knows",
    "values_not_finite": "values were no finite number",
    "corrupted_requests": "requests had a NaN in their logits: their answers are not to be trusted",
}


@dataclass(frozen=True)
class Finding:
    """Something out of the ordinary between two times (seconds since the epoch)."""

    kind: str
    start: float
    end: float
    text: str
    engine: int | None = None


def find(spans: Sequence[Span], engines: Mapping[int, Sequence[Span]], whole: Snapshot) -> list[Finding]:
    """Return what is out of the ordinary in the sum of all engines, in each engine, and in the counters."""
    findings = [*_lost(whole), *_hits(spans), *_storms(spans), *_stalls(spans), *_queues(spans)]
    for engine, own in engines.items():
        findings += _silences(own, engine)
    return sorted(findings, key=lambda finding: (finding.start, finding.kind))


def _stalls(spans: Sequence[Span]) -> Iterator[Finding]:
    ordinary = _ordinary([span.quantile(names.ITL, 0.5) for span in spans])
    if ordinary is None:
        return
    limit = max(_STALL_SECONDS, _STALL_GAP * ordinary)
    for run in _runs(spans, lambda span: (span.quantile(names.ITL, 1.0) or 0.0) > limit):
        worst = max(span.quantile(names.ITL, 1.0) or 0.0 for span in run)
        text = f"a stall: a token came {duration(worst)} after the one before; {duration(ordinary)} are ordinary"
        yield _finding("stall", run, text)


def _silences(spans: Sequence[Span], engine: int) -> Iterator[Finding]:
    """Find spans in which requests ran and no token came."""
    for run in _runs(spans, lambda span: (span.mean(names.RUNNING) or 0.0) >= 1 and not span.amounts[names.GENERATED]):
        seconds = sum(span.seconds for span in run)
        if seconds >= _SILENCE_SECONDS:
            text = f"engine {engine} ran requests for {duration(seconds)} and gave no token"
            yield _finding("stall", run, text, engine)


def _storms(spans: Sequence[Span]) -> Iterator[Finding]:
    def storms(span: Span) -> bool:
        count = span.amounts[names.PREEMPTIONS]
        return count >= _STORM_COUNT and count >= _STORM_SHARE * _finished(span)

    for run in _runs(spans, storms):
        count = sum(span.amounts[names.PREEMPTIONS] for span in run)
        usage = max((span.mean(names.KV_USAGE) or 0.0) for span in run)
        text = (
            f"a storm of preemptions: {number(round(count))} while {number(round(sum(map(_finished, run))))} requests "
            f"finished, KV cache {100 * usage:.0f} % full; a smaller --max-num-seqs or a larger cache ends it"
        )
        yield _finding("preemptions", run, text)


def _hits(spans: Sequence[Span]) -> Iterator[Finding]:
    for cache in names.CACHES:
        asked = [span for span in spans if span.amounts[f"{cache}_queries"] >= _HIT_QUERIES]
        rates = {id(span): span.ratio(f"{cache}_hits", f"{cache}_queries") or 0.0 for span in asked}
        ordinary = _before_the_fall(list(rates.values()))
        for run in _runs(asked, partial(_fallen, rates, _HIT_FALL * ordinary)):
            now = median(rates[id(span)] for span in run)
            fall = f"{names.label(f'{cache}_hit_rate')} fell from {100 * ordinary:.0f} % to {100 * now:.0f} %"
            yield _finding("hit_rate", run, f"{fall}: other prompts, or a cache emptied or too small")


def _fallen(rates: Mapping[int, float], limit: float, span: Span) -> bool:
    return rates[id(span)] < limit


def _before_the_fall(rates: Sequence[float]) -> float:
    """Return the median of the rates up to the first that is much lower; 0 where too little is known or hit."""
    known: list[float] = []
    for rate in rates:
        ordinary = median(known) if len(known) >= _SPANS_KNOWN else 0.0
        if ordinary >= _HIT_SHARE and rate < _HIT_FALL * ordinary:
            return ordinary
        known.append(rate)
    return 0.0


def _queues(spans: Sequence[Span]) -> Iterator[Finding]:
    ordinary = _ordinary([span.quantile(names.QUEUE, 0.5) for span in spans])
    if ordinary is None:
        return

    def grows(span: Span) -> bool:
        more = (span.mean(names.WAITING) or 0.0) > (span.mean(names.RUNNING) or 0.0)
        return more and (span.quantile(names.QUEUE, 0.5) or 0.0) > max(_STALL_SECONDS, _QUEUE_GROWTH * ordinary)

    for run in _runs(spans, grows):
        worst = max(span.quantile(names.QUEUE, 0.5) or 0.0 for span in run)
        yield _finding("queue", run, f"requests queued {duration(worst)}; {duration(ordinary)} are ordinary")


def _lost(whole: Snapshot) -> Iterator[Finding]:
    for name, text in _LOST.items():
        if whole.counters[name]:
            yield Finding("lost", whole.start, whole.end, f"{number(whole.counters[name])} {text}")
    rejected = sum(count for name, count in whole.counters.items() if name.startswith(names.REJECTED))
    if rejected:
        yield Finding("rejected", whole.start, whole.end, f"{number(rejected)} requests were refused at the front end")


def _runs(spans: Sequence[Span], odd: Callable[[Span], bool]) -> Iterator[list[Span]]:
    """Yield each group of neighbours that are odd."""
    for is_odd, group in groupby(spans, odd):
        if is_odd:
            yield list(group)


def _finding(kind: str, run: Sequence[Span], text: str, engine: int | None = None) -> Finding:
    return Finding(kind, run[0].start, run[-1].start + run[-1].seconds, text, engine)


def _finished(span: Span) -> float:
    return sum(amount for name, amount in span.amounts.items() if name.startswith(names.FINISHED))


def _ordinary(values: Sequence[float | None]) -> float | None:
    """Return the median; None where too few are known."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) >= _SPANS_KNOWN else None
