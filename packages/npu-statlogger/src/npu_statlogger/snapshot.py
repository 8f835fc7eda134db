"""What one line says: counters and distributions of one engine over a span of time.

What belongs to no engine (rejected requests, the multimodal cache) has lines of its own. Merging adds lines of any
engines and processes up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import FormatError
from npu_statlogger.sketch import Sketch

if TYPE_CHECKING:
    from npu_statlogger.fold import Batch

__all__ = ["QUANTILES", "SCHEMA", "Snapshot"]

SCHEMA = "npu-statlogger/1"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


@dataclass
class Snapshot:
    """Counters and distributions between `start` and `end` (seconds since the epoch); merging adds them up."""

    start: float = math.inf
    end: float = -math.inf
    processes: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    distributions: defaultdict[str, Sketch] = field(default_factory=lambda: defaultdict(Sketch))

    def __bool__(self) -> bool:
        """Tell whether anything was counted."""
        return bool(self.counters) or any(sketch.count for sketch in self.distributions.values())

    def add(self, batch: Batch) -> None:
        """Count what some steps brought; values that are no finite number are left out and counted as such."""
        self.counters.update(batch.counters)
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
        for name, sketch in other.distributions.items():
            self.distributions[name].merge(sketch)

    @property
    def seconds(self) -> float:
        """Length of the span, idle time included; 0 without data."""
        return max(self.end - self.start, 0.0)

    def rates(self) -> dict[str, float | None]:
        """Return what follows from the counters; None where the denominator is 0.

        Of the two rates of prompts, the computed one leaves out what a cache had: it is vLLM's "prompt throughput".
        """
        count = self.counters
        return {
            "prompt_tokens_total_per_second": _ratio(count["tokens.prompt"], self.seconds),
            "prompt_tokens_computed_per_second": _ratio(count["tokens.prompt_computed"], self.seconds),
            "generation_tokens_per_second": _ratio(count["tokens.generation"], self.seconds),
            "prefix_cache_hit_rate": _ratio(count["prefix_cache.hits"], count["prefix_cache.queries"]),
            "external_prefix_cache_hit_rate": _ratio(
                count["external_prefix_cache.hits"], count["external_prefix_cache.queries"]
            ),
            "mm_cache_hit_rate": _ratio(count["mm_cache.hits"], count["mm_cache.queries"]),
            "draft_acceptance_rate": _ratio(count["spec_decode.accepted_tokens"], count["spec_decode.draft_tokens"]),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON-ready data; percentiles and rates are there for readers, `from_dict` ignores them."""
        return {
            "schema": SCHEMA,
            "start": self.start,
            "end": self.end,
            "processes": sorted(self.processes),
            "models": sorted(self.models),
            "engines": sorted(self.engines),
            "rates": self.rates(),
            "counters": dict(sorted(self.counters.items())),
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
        """Rebuild a snapshot.

        Raises:
            FormatError: not this schema, or a part is missing or malformed.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            schema = data.get("schema") if isinstance(data, dict) else data
            msg = f"this npu-stat reads schema {SCHEMA!r}; the line has {schema!r}."
            raise FormatError(msg)
        try:
            snapshot = cls(
                start=float(data["start"]),
                end=float(data["end"]),
                processes=set(data["processes"]),
                models=set(data["models"]),
                engines={int(engine) for engine in data["engines"]},
                counters=Counter({str(name): int(value) for name, value in data["counters"].items()}),
            )
            for name, sketch in data["distributions"].items():
                snapshot.distributions[name] = Sketch.from_dict(sketch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            msg = f"not a line of {SCHEMA!r}: {error!r}."
            raise FormatError(msg) from error
        return snapshot


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
