"""What an interval line says: counters, totals, gauges and distributions of one engine over a span of time.

What belongs to no engine (rejected requests, the multimodal cache) has lines of its own. Merging adds lines of any
engines and processes up; it is associative, commutative and loses nothing, so that no order or grouping matters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import FormatError
from npu_statlogger.sketch import NANO, Sketch, is_bounded
from npu_statlogger.upgrade import upgraded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_statlogger.fold import Batch

__all__ = ["NO_ENGINE", "QUANTILES", "SCHEMA", "SCHEMA_1", "Snapshot"]

SCHEMA, SCHEMA_1 = "npu-statlogger/2", "npu-statlogger/1"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
NO_ENGINE = ""
"""Key of the gauges that belong to no engine."""

Gauges = defaultdict[str, dict[str, tuple[float, float]]]


@dataclass
class Snapshot:
    """Figures between `start` and `end` (seconds since the epoch); their names are in metrics.METRICS."""

    start: float = math.inf
    end: float = -math.inf
    processes: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    totals_nano: Counter[str] = field(default_factory=Counter)
    """Sums that are no whole numbers, in 1e-9 of their unit: integers, so that merging stays exact."""

    gauges: Gauges = field(default_factory=lambda: defaultdict(dict))
    """Engine (a number as text, or NO_ENGINE) -> name -> (seconds since the epoch, value): the latest of each."""

    distributions: defaultdict[str, Sketch] = field(default_factory=lambda: defaultdict(Sketch))

    def __bool__(self) -> bool:
        """Tell whether anything was counted."""
        return bool(self.counters) or any(sketch.count for sketch in self.distributions.values())

    def add(self, batch: Batch, engine: int | None = None) -> None:
        """Count what some steps brought; values that are no finite number are left out and counted as such."""
        batch.settle()
        self.counters.update(batch.counters)
        self.totals_nano.update(batch.totals_nano)
        _keep_latest(self.gauges[NO_ENGINE if engine is None else str(engine)], batch.gauges)
        for name, values in batch.values.items():
            refused = self.distributions[name].add(values)
            if refused:
                self.counters["values_not_finite"] += refused

    def merge(self, other: Snapshot) -> None:
        """Take in `other`; order and grouping of merges do not matter."""
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)
        self.processes |= other.processes
        self.models |= other.models
        self.engines |= other.engines
        self.counters.update(other.counters)
        self.totals_nano.update(other.totals_nano)
        for engine, gauges in other.gauges.items():
            _keep_latest(self.gauges[engine], gauges)
        for name, sketch in other.distributions.items():
            self.distributions[name].merge(sketch)

    @property
    def seconds(self) -> float:
        """Length of the span, idle time included; 0 without data."""
        return max(self.end - self.start, 0.0)

    def total(self, name: str) -> float:
        """Return a counter or a total in its unit, 0 if it is absent."""
        return self.totals_nano[name] / NANO if name in self.totals_nano else self.counters[name]

    def gauge(self, name: str) -> dict[str, float]:
        """Return the latest value of a gauge by engine."""
        return {engine: gauges[name][1] for engine, gauges in sorted(self.gauges.items()) if name in gauges}

    def rates(self) -> dict[str, float | None]:
        """Return what follows from the counters; None where the denominator is 0, or next to it.

        Of the two rates of prompts, the computed one leaves out what a cache had: it is vLLM's "prompt throughput".
        """
        count = self.counters
        return {
            "prompt_tokens_total_per_second": _ratio(count["prompt_tokens"], self.seconds),
            "prompt_tokens_computed_per_second": _ratio(count["prompt_tokens_by_source.local_compute"], self.seconds),
            "generation_tokens_per_second": _ratio(count["generation_tokens"], self.seconds),
            "prefix_cache_hit_rate": _ratio(count["prefix_cache_hits"], count["prefix_cache_queries"]),
            "external_prefix_cache_hit_rate": _ratio(
                count["external_prefix_cache_hits"], count["external_prefix_cache_queries"]
            ),
            "mm_cache_hit_rate": _ratio(count["mm_cache_hits"], count["mm_cache_queries"]),
            "draft_acceptance_rate": _ratio(
                count["spec_decode_num_accepted_tokens"], count["spec_decode_num_draft_tokens"]
            ),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON-ready data; percentiles and rates are there for readers, `from_dict` ignores them."""
        return {
            "schema": SCHEMA,
            "kind": "interval",
            "start": self.start,
            "end": self.end,
            "processes": sorted(self.processes),
            "models": sorted(self.models),
            "engines": sorted(self.engines),
            "rates": self.rates(),
            "counters": dict(sorted(self.counters.items())),
            "totals_nano": dict(sorted(self.totals_nano.items())),
            "gauges": {
                engine: {name: list(latest) for name, latest in sorted(gauges.items())}
                for engine, gauges in sorted(self.gauges.items())
                if gauges
            },
            "distributions": {
                name: {
                    "mean": sketch.mean,
                    **{label: sketch.quantile(q) for label, q in QUANTILES.items()},
                    **sketch.to_dict(),
                }
                for name, sketch in sorted(self.distributions.items())
                if sketch.count
            },
        }

    @classmethod
    def from_dict(cls, data: object) -> Snapshot:
        """Rebuild a snapshot from a line of this version or of version 1.

        Raises:
            FormatError: neither schema, another kind of line, or a part is missing or malformed.
        """
        schema = data.get("schema") if isinstance(data, dict) else data
        if not isinstance(data, dict) or schema not in (SCHEMA, SCHEMA_1):
            msg = f"this npu-stat reads schema {SCHEMA!r}; the line has {schema!r}."
            raise FormatError(msg)
        if data.get("kind", "interval") != "interval":
            msg = f"not an interval line of {SCHEMA!r}: its kind is {data['kind']!r}."
            raise FormatError(msg)
        try:
            return cls._from(upgraded(data) if schema == SCHEMA_1 else data)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            msg = f"not a line of {schema!r}: {error!r}."
            raise FormatError(msg) from error

    @classmethod
    def _from(cls, data: dict[str, Any]) -> Snapshot:
        snapshot = cls(
            start=float(data["start"]),
            end=float(data["end"]),
            processes=_texts(data["processes"]),
            models=_texts(data["models"]),
            engines={int(engine) for engine in data["engines"]},
            counters=Counter({str(name): int(value) for name, value in data["counters"].items()}),
            totals_nano=Counter({str(name): int(value) for name, value in data["totals_nano"].items()}),
        )
        for engine, gauges in data["gauges"].items():
            snapshot.gauges[str(engine)] = {
                str(name): (float(time), float(value)) for name, (time, value) in gauges.items()
            }
        for name, sketch in data["distributions"].items():
            snapshot.distributions[name] = Sketch.from_dict(sketch)
        gauges = (number for each in snapshot.gauges.values() for latest in each.values() for number in latest)
        if not all(map(is_bounded, (*snapshot.counters.values(), *snapshot.totals_nano.values(), *gauges))):
            msg = "a number is beyond all bounds"
            raise ValueError(msg)
        return snapshot


def _texts(values: Iterable[Any]) -> set[str]:
    if not all(isinstance(value, str) for value in values):
        msg = f"{values!r} are no texts"
        raise TypeError(msg)
    return set(values)


def _keep_latest(gauges: dict[str, tuple[float, float]], others: dict[str, tuple[float, float]]) -> None:
    """Keep the later of two values; of two at the same time the larger, so that merging commutes."""
    for name, latest in others.items():
        gauges[name] = max(gauges.get(name, latest), latest)


def _ratio(part: float, whole: float) -> float | None:
    ratio = part / whole if whole > 0 else math.inf
    return ratio if math.isfinite(ratio) else None  # no JSON holds what a span of next to nothing gives
