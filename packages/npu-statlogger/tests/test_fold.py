"""Folding vLLM's own records: every field that the lines rest on is still there and means what we think."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import VllmConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.perf import PerfStats
from vllm.v1.metrics.stats import (
    IterationStats,
    KVCacheEvictionEvent,
    LoRARequestStates,
    MultiModalCacheStats,
    PrefixCacheStats,
    SchedulerIterationDetails,
    SchedulerStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from npu_statlogger.fold import Batch, fold_iteration, fold_mm_cache, fold_scheduler
from npu_statlogger.jsonl import encode
from npu_statlogger.snapshot import Snapshot


def rates_of(batch: Batch) -> dict[str, float | None]:
    snapshot = Snapshot()
    snapshot.add(batch)
    return snapshot.rates()


def test_an_iteration_gives_latencies_tokens_preemptions_and_finished_requests(iteration_stats: IterationStats) -> None:
    batch = Batch()
    fold_iteration(batch, iteration_stats)
    batch.settle()
    assert batch.counters == {
        "generation_tokens": 3, "prompt_tokens": 100, "prompt_tokens_cached": 70, "num_preemptions": 1,
        "prompt_tokens_by_source.local_compute": 30, "prompt_tokens_by_source.local_cache_hit": 60,
        "prompt_tokens_by_source.external_kv_transfer": 10, "request_success.length": 1,
        "watermark_requests.not_watermarked": 1,
    }  # fmt: skip
    expected = {
        "time_to_first_token_seconds": [0.5], "inter_token_latency_seconds": [0.02, 0.04],
        "e2e_request_latency_seconds": [4.0], "request_queue_time_seconds": [1.0], "request_prefill_time_seconds": [0.5],
        "request_decode_time_seconds": [2.0], "request_inference_time_seconds": [2.5],
        "request_time_per_output_token_seconds": [0.2], "time_per_output_token_seconds": [0.2],
        "request_prompt_tokens": [100], "request_generation_tokens": [11], "request_cached_tokens": [70],
        "request_prefill_kv_computed_tokens": [30], "request_params_max_tokens": [11], "request_num_preemptions": [0],
        "iteration_tokens_total": [33],
    }  # fmt: skip
    assert set(batch.values) == set(expected)
    for name, values in expected.items():
        assert batch.values[name] == pytest.approx(values), name


def test_a_scheduler_record_gives_load_and_cache_hits(scheduler_stats: SchedulerStats) -> None:
    scheduler_stats.connector_prefix_cache_stats = PrefixCacheStats(requests=1, queries=40, hits=10)
    scheduler_stats.spec_decoding_stats = SpecDecodingStats(
        num_spec_tokens=2, num_draft_tokens=8, num_accepted_tokens=6
    )
    batch = Batch()
    fold_scheduler(batch, scheduler_stats)
    rates = rates_of(batch)
    assert rates["prefix_cache_hit_rate"] == 0.6
    assert rates["external_prefix_cache_hit_rate"] == 0.25
    assert rates["draft_acceptance_rate"] == 0.75
    load = {
        "num_requests_running": [3], "num_requests_waiting": [6], "kv_cache_usage_perc": [0.25],
        "num_requests_waiting_by_reason.capacity": [2], "num_requests_waiting_by_reason.deferred": [4],
    }  # fmt: skip
    assert batch.values == load
    assert {name: [value] for name, (_, value) in batch.gauges.items() if name in load} == load


def test_waiting_is_what_vllm_s_own_log_says(scheduler_stats: SchedulerStats, caplog: pytest.LogCaptureFixture) -> None:
    theirs = LoggingStatLogger(VllmConfig())
    theirs.record(scheduler_stats, None)
    with caplog.at_level("DEBUG", "vllm"):
        logging.getLogger("vllm").addHandler(caplog.handler)
        theirs.log()
        logging.getLogger("vllm").removeHandler(caplog.handler)
    batch = Batch()
    fold_scheduler(batch, scheduler_stats)
    assert (
        f"Waiting: {batch.values['num_requests_waiting'][0]} reqs, "
        f"Deferred: {batch.values['num_requests_waiting_by_reason.deferred'][0]} reqs" in caplog.text
    )


def test_prompt_tokens_from_a_cache_are_in_one_of_two_rates(iteration_stats: IterationStats) -> None:
    batch = Batch()
    fold_iteration(batch, iteration_stats)
    snapshot = Snapshot(start=0, end=2)
    snapshot.add(batch)
    assert snapshot.rates()["prompt_tokens_total_per_second"] == 50
    assert snapshot.rates()["prompt_tokens_computed_per_second"] == 15


def test_a_request_of_one_token_has_no_time_per_output_token(iteration_stats: IterationStats) -> None:
    iteration_stats.finished_requests[0].mean_time_per_output_token = 0
    batch = Batch()
    fold_iteration(batch, iteration_stats)
    batch.settle()
    assert "time_per_output_token_seconds" not in batch.values
    assert batch.values["request_time_per_output_token_seconds"] == [0]


def test_fresh_records_count_as_nothing_but_a_step() -> None:
    batch = Batch()
    fold_iteration(batch, IterationStats())
    fold_scheduler(batch, SchedulerStats())
    fold_mm_cache(batch, MultiModalCacheStats())
    assert batch.counters == {"scheduler_steps": 1}
    assert {value for values in batch.values.values() for value in values} == {0}


def test_multimodal_cache_hits() -> None:
    stats = MultiModalCacheStats()
    stats.record(num_queries=4, num_hits=1)
    batch = Batch()
    fold_mm_cache(batch, stats)
    assert rates_of(batch)["mm_cache_hit_rate"] == 0.25


def test_a_field_that_a_later_vllm_lacks_is_left_out() -> None:
    batch = Batch()
    fold_iteration(batch, object())
    fold_scheduler(batch, object())
    assert batch.counters == {"scheduler_steps": 1}
    assert not batch.values


def test_the_tier_that_had_the_tokens_and_what_preempted_requests_found() -> None:
    stats = SchedulerStats(connector_prefix_cache_stats=PrefixCacheStats())
    stats.prefix_cache_stats.record(num_tokens=100, num_hits=60, preempted=True)
    sources = {CacheHitSource.HOST: 24, CacheHitSource.DISK: 16}
    stats.connector_prefix_cache_stats.record(num_tokens=90, num_hits=40, preempted=False, hits_by_source=sources)
    stats.prefix_cache_stats.reset = True
    batch = Batch()
    fold_scheduler(batch, stats)
    assert batch.counters == {
        "scheduler_steps": 1, "prefix_cache_preempted_requests": 1, "prefix_cache_preempted_queries": 100,
        "prefix_cache_preempted_hits": 60, "prefix_cache_resets": 1, "external_prefix_cache_requests": 1,
        "external_prefix_cache_queries": 90, "external_prefix_cache_hits": 40,
        "prompt_tokens_cached_by_source.host": 24, "prompt_tokens_cached_by_source.disk": 16,
    }  # fmt: skip


def test_speculation_by_position() -> None:
    drafts = SpecDecodingStats.new(3)
    drafts.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    drafts.observe_draft(num_draft_tokens=2, num_accepted_tokens=0)
    batch = Batch()
    fold_scheduler(batch, SchedulerStats(spec_decoding_stats=drafts))
    counts = {name.removeprefix("spec_decode_num_"): value for name, value in batch.counters.items()}
    del counts["scheduler_steps"]
    assert counts == {
        "drafts": 2, "draft_tokens": 5, "accepted_tokens": 2, "accepted_tokens_per_pos.0": 1, "accepted_tokens_per_pos.1": 1,
        "draft_tokens_per_pos.0": 2, "draft_tokens_per_pos.1": 2, "draft_tokens_per_pos.2": 1,
    }  # fmt: skip


def test_adapters_stages_and_evictions() -> None:
    stats = SchedulerStats(
        running_lora_adapters={"sql.v2": 3},
        waiting_lora_adapters={"sql.v2": 1},
        num_kv_fetch_reqs_by_stage={"in_progress": 2},
        kv_cache_eviction_events=[KVCacheEvictionEvent(9.0, 1.0, (2.0, 3.0)), KVCacheEvictionEvent(4.0, 4.0, ())],
        current_wave=5,
    )
    batch = Batch()
    fold_scheduler(batch, stats, time=1000.0)
    assert batch.gauges["lora_requests_running.sql.v2"] == (1000, 3)
    assert batch.gauges["lora_requests_waiting.sql.v2"] == (1000, 1)
    assert batch.gauges["num_requests_kv_fetch_by_stage.in_progress"] == (1000, 2)
    assert batch.gauges["engine_wave"] == (1000, 5)
    assert batch.values["kv_block_lifetime_seconds"] == [9, 4]
    assert batch.values["kv_block_idle_before_evict_seconds"] == [1, 4]
    assert batch.values["kv_block_reuse_gap_seconds"] == [2, 3]


def test_graphs_estimates_and_details_of_a_step() -> None:
    stats = SchedulerStats(
        perf_stats=PerfStats(num_flops_per_gpu=10**15, num_read_bytes_per_gpu=7, num_write_bytes_per_gpu=5),
        cudagraph_stats=CUDAGraphStat(num_unpadded_tokens=3, num_padded_tokens=4, num_paddings=1, runtime_mode="FULL"),
        iteration_details=SchedulerIterationDetails(
            17, 1, 30, 2, 2, elapsed_ms=12.5, num_encoder_inputs=1, is_dummy=True
        ),
    )
    batch = Batch()
    fold_scheduler(batch, stats)
    assert batch.counters == {
        "scheduler_steps": 1, "estimated_flops_per_gpu": 10**15, "estimated_read_bytes_per_gpu": 7,
        "estimated_write_bytes_per_gpu": 5, "cudagraph_steps.FULL": 1, "cudagraph_unpadded_tokens.FULL": 3,
        "cudagraph_padded_tokens.FULL": 4, "cudagraph_paddings.FULL": 1, "iteration_encoder_inputs": 1,
        "iteration_dummy_steps": 1,
    }  # fmt: skip
    assert batch.gauges["iteration_index"][1] == 17
    details = {name: values for name, values in batch.values.items() if name.startswith("iteration")}
    assert details == {
        "iteration_elapsed_seconds": [0.0125], "iteration_ctx_requests": [1], "iteration_ctx_tokens": [30],
        "iteration_generation_requests": [2], "iteration_generation_tokens": [2],
    }  # fmt: skip


def test_whole_numbers_of_numpy_are_counters_and_other_numbers_totals() -> None:
    batch = Batch()
    for amount in (np.int64(3), np.uint8(4), 5, np.float32(0.5), 0.25, 0, False, None):
        batch.count("blocks", amount)
    snapshot = Snapshot(start=0, end=1)
    snapshot.add(batch)
    assert json.loads(encode(snapshot))["counters"] == {"blocks": 12}
    assert batch.totals_nano == {"blocks": 750_000_000}
    batch.count("blocks", math.nan)
    batch.count("blocks", 1e300)
    assert batch.counters["values_not_finite"] == 2
    assert batch.totals_nano == {"blocks": 750_000_000}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e100])
def test_a_gauge_that_is_not_finite_is_left_out_and_counted_once(value: float) -> None:
    batch = Batch()
    fold_scheduler(batch, SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5), time=1.0)
    fold_scheduler(batch, SchedulerStats(num_running_reqs=4, kv_cache_usage=value), time=2.0)
    snapshot = Snapshot(start=0, end=1)
    snapshot.add(batch)
    assert snapshot.counters == {"scheduler_steps": 2, "values_not_finite": 1}
    assert batch.gauges["kv_cache_usage_perc"] == (1.0, 0.5)
    assert batch.gauges["num_requests_running"] == (2.0, 4.0)
    assert encode(snapshot)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["sql", "chat"]), st.integers(0, 2)), max_size=30))
def test_the_gauges_of_adapters_are_what_vllm_knows_after_each_step(moves: list[tuple[str, str, int]]) -> None:
    states, adapters, gauges = LoRARequestStates(log_stats=True), set[str](), dict[str, float]()
    for time, (request, adapter, move) in enumerate(moves):
        (states.request_waiting, states.request_running, states.request_finished)[move](request, adapter)
        stats, batch = SchedulerStats(), Batch()
        states.update_scheduler_stats(stats)
        fold_scheduler(batch, stats, time, adapters)
        gauges |= {name: value for name, (_, value) in batch.gauges.items() if name.startswith("lora")}
        named = {f"lora_requests_running.{name}": value for name, value in stats.running_lora_adapters.items()}
        named |= {f"lora_requests_waiting.{name}": value for name, value in stats.waiting_lora_adapters.items()}
        assert {name: value for name, value in gauges.items() if value} == {n: v for n, v in named.items() if v}
