"""The dashboard: about metrics that vLLM exports with this connector, in expressions that Prometheus can read."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("vllm", reason="the metrics are of vLLM's frame; install npu-kvconnector[vllm]")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingHistogramMetadata

from npu_kvconnector import metrics
from npu_kvconnector.dashboard import text_of_dashboard
from npu_kvconnector.spec import NPUTieringSpec

OF_VLLM = {"vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "vllm:num_requests_running"}


def exported() -> dict[str, tuple[str, ...]]:
    """Return the series that the connector's metrics make, with their labels."""
    definitions = NPUTieringSpec.build_metric_definitions({}) | get_connector_metric_definitions()
    series = {}
    for name, metric in definitions.items():
        suffix = "_total" if isinstance(metric, OffloadingCounterMetadata) else ""
        suffix = "_bucket" if isinstance(metric, OffloadingHistogramMetadata) else suffix
        series[name + suffix] = metric.labelnames
    return series


def expressions() -> list[str]:
    panels = json.loads(text_of_dashboard())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_each_series_is_one_that_the_connector_exports() -> None:
    known = exported()
    for text in expressions():
        for name in re.findall(r"vllm:\w+", text):
            assert name in known or name in OF_VLLM, name
            grouped = re.search(r"by \(([^)]*)\)", text)
            if name in known and grouped:
                allowed = {*known[name], "engine", "le"}
                assert set(grouped[1].split(", ")) <= allowed, text


def test_each_metric_of_ours_is_shown_but_the_count_behind_a_state() -> None:
    shown = " ".join(expressions())
    assert [name for name in metrics.DEFINITIONS if name not in shown] == [metrics.BREAKER_OPENED]


def test_the_expressions_are_promql() -> None:
    promql = pytest.importorskip("promql_parser")
    for text in expressions():
        promql.parse(text.replace("$__rate_interval", "5m"))


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads(text_of_dashboard())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
