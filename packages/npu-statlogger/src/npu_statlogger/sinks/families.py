"""Figures as families of metrics of prometheus_client, for the sinks that serve or push them."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from npu_statlogger.metrics import Kind
from npu_statlogger.sinks.figures import Cumulative, Series
from npu_statlogger.snapshot import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npu_statlogger.lines import Line
    from npu_statlogger.sketch import Sketch

__all__ = ["PREFIX", "Families"]

PREFIX = "npu_statlogger_"
_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.DISTRIBUTION: SummaryMetricFamily,
}


class Families(Collector):
    """Cumulative figures for whoever collects; a scrape costs the server nothing before."""

    def __init__(self, model: str) -> None:
        self._figures, self._model, self._lock = Cumulative(), model, threading.Lock()

    def add(self, lines: Sequence[Line]) -> None:
        """Count interval lines."""
        with self._lock:
            self._figures.add(lines)

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each figure."""
        families: dict[str, Metric] = {}
        with self._lock:
            for series in self._figures.series():
                self._add(families, series)
        return iter(families.values())

    def describe(self) -> list[Metric]:
        """Return nothing: which figures there will be is not known when the collector is registered."""
        return []

    def _add(self, families: dict[str, Metric], series: Series) -> None:
        name = _family_name(series)
        labels = {"model_name": self._model, "engine": series.engine}
        if series.label[0]:
            labels[series.label[0]] = series.label[1]
        if name not in families:
            entry = series.metric
            meaning = f"{entry.meaning} ({entry.unit})" if entry is not None else "from a connector of vLLM"
            families[name] = _FAMILIES[series.kind](name, meaning)
        family = families[name]
        if series.kind is Kind.DISTRIBUTION:
            sketch = cast("Sketch", series.value)
            for q in QUANTILES.values():
                family.add_sample(name, {**labels, "quantile": str(q)}, sketch.quantile(q))
            family.add_sample(f"{name}_count", labels, sketch.count)
            family.add_sample(f"{name}_sum", labels, sketch.total)
        else:
            sample = f"{name}_total" if series.kind is Kind.COUNTER else name
            family.add_sample(sample, labels, cast(float, series.value))


def _family_name(series: Series) -> str:
    """Return the name of a family; a distribution over steps beside a gauge of that name says so."""
    return PREFIX + re.sub("[^a-zA-Z0-9_]", "_", series.name) + ("_per_step" if series.per_step else "")
