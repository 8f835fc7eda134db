"""The table of figures: it covers every field of vLLM's records, and what it says of vLLM's metrics is so."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.metrics import loggers, perf, stats
from vllm.v1.spec_decode import metrics as spec_decode

from npu_statlogger.metrics import Kind, describe, labelled, metrics, split_label

NOT_KEPT = {
    # Read by connectors.py, whatever the connector names them.
    "SchedulerStats.kv_connector_stats", "SchedulerStats.ec_connector_stats",
    "FinishedRequestStats.request_id",  # of per-request lines
    "PromptTokenStats.ALL_SOURCES",
    "IterationStats.compute_nans_in_logits",  # a setting, of vLLM 0.33
    "PerfStats.debug_stats",  # how vLLM's estimate came about, under VLLM_DEBUG_MFU_METRICS
}  # fmt: skip
RECORDS = (
    stats.SchedulerStats, stats.PrefixCacheStats, stats.MultiModalCacheStats, stats.KVCacheEvictionEvent,
    stats.SchedulerIterationDetails, stats.FinishedRequestStats, stats.PromptTokenStats, spec_decode.SpecDecodingStats,
    CUDAGraphStat, perf.PerfStats,
)  # fmt: skip
EXPORTED = {
    name.removesuffix("_total") if name.startswith("vllm:estimated") else name
    for module in (loggers, perf, spec_decode)
    for name in re.findall(r'"(vllm:[a-z_0-9]+)"', inspect.getsource(module))
}
ELSEWHERE = {"cache_config_info", "lora_requests_info"}  # configuration; a label with names, whose numbers we have


def fields() -> set[str]:
    found = {f"{record.__name__}.{field.name}" for record in RECORDS for field in dataclasses.fields(record)}
    return found | {f"IterationStats.{name}" for name in vars(stats.IterationStats())}


def test_every_field_of_vllm_s_records_is_a_source_of_a_figure() -> None:
    sources = {source for metric in metrics() for source in metric.sources}
    assert sorted(fields() - sources - NOT_KEPT) == []
    assert {source for source in sources if "." in source} <= fields() | {"IterationStats.num_prompt_tokens"}


def test_every_metric_of_vllm_s_is_a_figure_and_the_other_way_round() -> None:
    exported = {name.removeprefix("vllm:") for name in EXPORTED if "diffusion" not in name} - ELSEWHERE
    assert {metric.name for metric in metrics() if not metric.own} == exported


def test_names_are_unique_within_a_kind() -> None:
    names = [(metric.kind, metric.name) for metric in metrics()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "parts"), [("a.b.c", ("a", "b.c")), ("a", ("a", ""))])
def test_a_label_follows_the_first_dot(name: str, parts: tuple[str, str]) -> None:
    assert split_label(name) == parts


def test_a_name_with_its_label_finds_its_figure() -> None:
    metric = describe(Kind.COUNTER, labelled("request_success", "length"))
    assert metric is not None
    assert (metric.label, metric.unit) == ("finished_reason", "requests")
    assert describe(Kind.COUNTER, "kv_offload_load_bytes") is None
