"""Figures over time in bounded memory: spans of equal length, twice as long as soon as there are too many.

Counters of a line are spread evenly over its time, so that lines of several engines, which begin at different moments,
add up to the rates of their sum. Distributions cannot be divided: they go whole to the span of the line's middle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npu_statlogger.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npu_statlogger.snapshot import Snapshot

__all__ = ["Span", "Timeline"]

_LONGEST = 86400.0
"""Seconds that a line may plausibly cover."""


@dataclass
class Span:
    """What happened in `seconds` from `start` on; `seconds` leaves out what lies before or behind all lines."""

    start: float
    seconds: float
    amounts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sketches: defaultdict[str, Sketch] = field(default_factory=lambda: defaultdict(Sketch))

    def merge(self, other: Span) -> None:
        """Take in the figures of another span."""
        for name, amount in other.amounts.items():
            self.amounts[name] += amount
        for name, sketch in other.sketches.items():
            self.sketches[name].merge(sketch)

    def rate(self, name: str) -> float:
        """Return a counter's amount per second."""
        return self.amounts[name] / self.seconds if self.seconds > 0 else 0.0

    def ratio(self, part: str, whole: str) -> float | None:
        """Return one amount over another; None where that is 0."""
        return self.amounts[part] / self.amounts[whole] if self.amounts[whole] > 0 else None

    def mean(self, name: str) -> float | None:
        """Return the mean of a distribution that the timeline keeps the mean of; None without values."""
        return self.ratio(f"{name}.sum", f"{name}.count")

    def quantile(self, name: str, q: float) -> float | None:
        """Return a percentile of a distribution that the timeline keeps; None without values."""
        return self.sketches[name].quantile(q) if name in self.sketches else None


class Timeline:
    """Spans in the order of time; at most `limit`, which bounds the memory however long the run was."""

    def __init__(self, limit: int, sketches: Iterable[str] = (), means: Iterable[str] = (), width: float = 1.0) -> None:
        self.width = width
        self.start, self.end = math.inf, -math.inf
        self._limit = limit
        self._sketches, self._means = set(sketches), set(means)
        self._spans: dict[int, Span] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Take in one line."""
        begin, end = snapshot.start, snapshot.end
        if not 0 <= end - begin <= _LONGEST:  # the clock was set in between: when it ended is all that is known
            begin = end
        self.start, self.end = min(self.start, begin), max(self.end, end)
        while (end - begin) > self.width:  # a line covers two spans at most, and none is left empty between lines
            self._double()
        self._spread(snapshot, begin, end)
        middle = self._span(math.floor((begin + end) / 2 / self.width))
        for name in snapshot.distributions.keys() & self._sketches:
            middle.sketches[name].merge(snapshot.distributions[name])
        for name in snapshot.distributions.keys() & self._means:
            middle.amounts[f"{name}.sum"] += snapshot.distributions[name].total
            middle.amounts[f"{name}.count"] += snapshot.distributions[name].count
        while len(self._spans) > self._limit:
            self._double()

    def forget(self, before: float) -> None:
        """Drop the spans that began before a time."""
        self._spans = {index: span for index, span in self._spans.items() if span.start >= before}
        self.start = max(self.start, min((span.start for span in self._spans.values()), default=before))

    def coarsen(self, width: float) -> None:
        """Make the spans at least as long as those of another timeline, so that they lie on one another."""
        while self.width < width:
            self._double()

    def __iter__(self) -> Iterator[Span]:
        """Yield the spans that hold anything, in the order of time."""
        for _, span in sorted(self._spans.items()):
            low, high = max(self.start, span.start), min(self.end, span.start + self.width)
            span.seconds = max(high - low, 0.0)
            yield span

    def __len__(self) -> int:
        """Return the number of spans that hold anything."""
        return len(self._spans)

    def _spread(self, snapshot: Snapshot, begin: float, end: float) -> None:
        for index in range(math.floor(begin / self.width), math.floor(end / self.width) + 1):
            low, high = max(begin, index * self.width), min(end, (index + 1) * self.width)
            share = (high - low) / (end - begin) if end > begin else 1.0
            if share > 0:
                amounts = self._span(index).amounts
                for name, amount in snapshot.counters.items():
                    amounts[name] += amount * share

    def _span(self, index: int) -> Span:
        if index not in self._spans:
            self._spans[index] = Span(index * self.width, self.width)
        return self._spans[index]

    def _double(self) -> None:
        old, self.width, self._spans = self._spans, self.width * 2, {}
        for index, span in old.items():
            kept = self._spans.setdefault(index // 2, span)
            kept.start = index // 2 * self.width
            if kept is not span:
                kept.merge(span)
