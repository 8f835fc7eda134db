"""Interval lines as plain figures: a flat row for tables, and series with labels for what is scraped or exported."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_statlogger.metrics import Kind, Metric, describe, split_label
from npu_statlogger.snapshot import NO_ENGINE, QUANTILES, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npu_statlogger.lines import Line, Note, RequestLine, Run, StepLine
    from npu_statlogger.sketch import Sketch

__all__ = ["LABEL_LIMIT", "Cumulative", "Series", "flat", "origin", "place", "row"]

logger = logging.getLogger("vllm.npu_statlogger")

LABEL_LIMIT = 256
"""Values of one label that are told apart, such as names of adapters; further ones are left out, with a message."""


@dataclass(frozen=True)
class Series:
    """One figure of one engine, with its label."""

    kind: Kind
    name: str
    engine: str
    label: tuple[str, str]
    """Name and value of the label, both "" without one."""

    value: float | Sketch

    @property
    def metric(self) -> Metric | None:
        """The table's entry; None for a figure that a connector of vLLM brought itself."""
        return describe(self.kind, self.name)

    @property
    def per_step(self) -> bool:
        """Whether this is the distribution over steps of a figure that is a gauge too, by the same name."""
        return self.kind is Kind.DISTRIBUTION and describe(Kind.GAUGE, self.name) is not None


def origin(snapshot: Snapshot) -> dict[str, Any]:
    """Return what the figures of an interval line are of, as columns of a table."""
    return {
        "start": snapshot.start,
        "end": snapshot.end,
        "process": " ".join(sorted(snapshot.processes)),
        "model": " ".join(sorted(snapshot.models)),
        "engine": _engine(snapshot),
    }


def place(snapshot: Snapshot) -> str:
    """Return a name for what the figures of an interval line are of: engine_<index>, or front_end for no engine."""
    return f"engine_{_engine(snapshot)}" if snapshot.engines else "front_end"


def row(line: RequestLine | StepLine | Run | Note) -> dict[str, Any]:
    """Return a line of another kind as columns of a table; what has parts is JSON."""
    data = line.to_dict()
    del data["schema"], data["kind"]
    return {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in data.items()}


def flat(snapshot: Snapshot) -> dict[str, float]:
    """Return every figure under a name of its own; of a distribution count, mean, extremes and percentiles."""
    figures: dict[str, float] = {name: value for name, value in snapshot.rates().items() if value is not None}
    figures |= {name: float(value) for name, value in snapshot.counters.items()}
    figures |= {name: snapshot.total(name) for name in snapshot.totals_nano}
    for gauges in snapshot.gauges.values():
        figures |= {name: value for name, (_, value) in gauges.items()}
    for name, sketch in snapshot.distributions.items():
        if sketch.count:
            figures |= {f"{name}_{part}": value for part, value in _parts(sketch).items()}
    return figures


class Cumulative:
    """All that was brought so far, by engine: counters that only grow, and the latest gauges.

    They begin at 0 with the process, as those of any exporter do; receivers know that from the start time.
    """

    def __init__(self) -> None:
        self.engines: defaultdict[str, Snapshot] = defaultdict(Snapshot)
        self._labels: defaultdict[tuple[Kind, str], set[str]] = defaultdict(set)
        self._full: set[tuple[Kind, str]] = set()

    def add(self, lines: Iterable[Line]) -> None:
        """Count interval lines."""
        for line in lines:
            if isinstance(line, Snapshot):
                self.engines[_engine(line)].merge(line)

    def series(self) -> Iterator[Series]:
        """Yield every figure; a label of too many values ends at LABEL_LIMIT."""
        for engine, snapshot in sorted(self.engines.items()):
            for kind, figures in _sections(snapshot).items():
                for name, value in sorted(figures.items()):
                    plain, label = split_label(name)
                    if self._admit(kind, plain, label):
                        yield Series(kind, plain, engine, (_label_name(kind, plain, label), label), value)

    def _admit(self, kind: Kind, name: str, label: str) -> bool:
        known = self._labels[kind, name]
        if label in known or len(known) < LABEL_LIMIT:
            known.add(label)
            return True
        if (kind, name) not in self._full:
            self._full.add((kind, name))
            logger.warning("Statistics: %s has more than %d labels; others are left out.", name, LABEL_LIMIT)
        return False


def _sections(snapshot: Snapshot) -> dict[Kind, dict[str, float | Sketch]]:
    return {
        Kind.COUNTER: {**snapshot.counters, **{name: snapshot.total(name) for name in snapshot.totals_nano}},
        Kind.GAUGE: {name: value for each in snapshot.gauges.values() for name, (_, value) in each.items()},
        Kind.DISTRIBUTION: {name: sketch for name, sketch in snapshot.distributions.items() if sketch.count},
    }


def _engine(snapshot: Snapshot) -> str:
    return ",".join(map(str, sorted(snapshot.engines))) or NO_ENGINE


def _label_name(kind: Kind, name: str, label: str) -> str:
    metric = describe(kind, name)
    return (metric.label if metric is not None and metric.label else "label") if label else ""


def _parts(sketch: Sketch) -> dict[str, float]:
    quantiles = {label: sketch.quantile(q) for label, q in QUANTILES.items()}
    parts = {"count": sketch.count, "mean": sketch.mean, "min": sketch.minimum, **quantiles, "max": sketch.maximum}
    return {name: value for name, value in parts.items() if math.isfinite(value)}
