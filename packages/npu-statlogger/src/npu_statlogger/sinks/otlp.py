"""OpenTelemetry metrics by OTLP over HTTP, by the SDK's exporter.

Counters are cumulative sums, distributions exponential histograms. Our buckets are of another width, so that the
values of one are given to the histogram as its estimate: what a receiver makes of them is within ERROR of the values.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, ClassVar, cast

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from npu_statlogger.metrics import Kind
from npu_statlogger.sinks.exporter import SECONDS, Exporter
from npu_statlogger.sketch import RELATIVE_ERROR

if TYPE_CHECKING:
    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Run
    from npu_statlogger.sinks.figures import Series
    from npu_statlogger.sketch import Sketch

__all__ = ["ERROR", "SCALE", "Otlp", "open_sink"]

SCALE = 6
"""Of the histograms: buckets 2^(2^-6), 1.1 %, wide."""

ERROR = (1 + RELATIVE_ERROR) * 2**2**-SCALE - 1
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def open_sink(config: StatLoggerConfig, run: Run) -> Otlp:
    """Return the sink; the collector is first asked when there is something to bring."""
    return Otlp(config.otlp, run)


class Otlp(Exporter):
    """Sends figures `vllm.<figure>` of the resource `service.name` = vllm, `service.instance.id` = host:pid."""

    name: ClassVar[str] = "otlp"

    def __init__(self, url: str, run: Run) -> None:
        super().__init__()
        endpoint = url if url.rstrip("/").endswith("/v1/metrics") else f"{url.rstrip('/')}/v1/metrics"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=SECONDS)
        self._start = int(run.time * 1e9)
        self._resource = Resource.create(
            {"service.name": "vllm", "service.instance.id": run.process, "service.version": run.versions["vllm"]}
        )
        self._scope = InstrumentationScope("npu_statlogger", run.versions["npu-statlogger"])
        self._model = run.model

    def send(self) -> None:
        """Send all figures.

        Raises:
            ConnectionError: the collector did not take them.
        """
        by_name: defaultdict[tuple[Kind, str], list[Series]] = defaultdict(list)
        for series in self.figures.series():
            by_name[series.kind, series.name].append(series)
        scope = ScopeMetrics(self._scope, [self._metric(*key, all_of) for key, all_of in by_name.items()], "")
        # The exporter tells each of its attempts; one that follows a failure has nothing new to say.
        logging.getLogger(OTLPMetricExporter.__module__).setLevel(logging.CRITICAL if self.unsent else logging.NOTSET)
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data, timeout_millis=SECONDS * 1e3) is not MetricExportResult.SUCCESS:
            msg = "the collector did not take the metrics; the exporter's own message says why"
            raise ConnectionError(msg)

    def close(self) -> None:
        """Send what the last attempt could not, and close the connection."""
        super().close()
        self._exporter.shutdown()

    def _metric(self, kind: Kind, name: str, all_of: list[Series]) -> Metric:
        entry = all_of[0].metric
        now = time.time_ns()
        data: Sum | Gauge | ExponentialHistogram
        if kind is Kind.DISTRIBUTION:
            data = ExponentialHistogram([self._histogram(series, now) for series in all_of], _CUMULATIVE)
        else:
            values = [(self._attributes(series), cast(float, series.value)) for series in all_of]
            points = [NumberDataPoint(attributes, self._start, now, value) for attributes, value in values]
            data = Gauge(points) if kind is Kind.GAUGE else Sum(points, _CUMULATIVE, is_monotonic=True)
        # A gauge and the distribution over steps that has its name are two metrics.
        full = f"vllm.{name}{'.per_step' if all_of[0].per_step else ''}"
        return Metric(full, entry.meaning if entry is not None else "", entry.unit if entry is not None else "", data)

    def _attributes(self, series: Series) -> dict[str, str]:
        labels = {series.label[0]: series.label[1]} if series.label[0] else {}
        return {"model_name": self._model, "engine": series.engine, **labels}

    def _histogram(self, series: Series, now: int) -> ExponentialHistogramDataPoint:
        sketch = cast("Sketch", series.value)
        zero, counts = sketch.estimates()
        buckets = Counter[int]()
        for value, count in counts:
            buckets[math.ceil(math.log2(value) * 2**SCALE) - 1] += count
        offset = min(buckets, default=0)
        dense = [buckets[index] for index in range(offset, max(buckets, default=-1) + 1)]
        return ExponentialHistogramDataPoint(
            attributes=self._attributes(series),
            start_time_unix_nano=self._start,
            time_unix_nano=now,
            count=sketch.count,
            sum=sketch.total,
            scale=SCALE,
            zero_count=zero,
            positive=Buckets(offset, dense),
            negative=Buckets(0, []),
            flags=0,
            min=sketch.minimum,
            max=sketch.maximum,
        )
