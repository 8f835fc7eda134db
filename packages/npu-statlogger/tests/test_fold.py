"""Folding vLLM's own records: every field that the lines rest on is still there and means what we think."""

from __future__ import annotations

import logging

import pytest
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from npu_statlogger.fold import Batch, fold_iteration, fold_mm_cache, fold_scheduler
from npu_statlogger.snapshot import Snapshot


def rates_of(batch: Batch) -> dict[str, float | None]:
    snapshot = Snapshot()
    snapshot.add(batch)
    return snapshot.rates()


def test_an_iteration_gives_latencies_tokens_preemptions_and_finished_requests(iteration_stats: IterationStats) -> None:
    batch = Batch()
    fold_iteration(batch, iteration_stats)
    assert batch.counters == {
        "tokens.generation": 3,
        "tokens.prompt": 100,
        "tokens.prompt_computed": 30,
        "tokens.prompt_local_cache": 60,
        "tokens.prompt_external_cache": 10,
        "preemptions": 1,
        "finished.length": 1,
    }
    expected = {
        "ttft_seconds": [0.5],
        "inter_token_seconds": [0.02, 0.04],
        "e2e_seconds": [4.0],
        "queue_seconds": [1.0],
        "prefill_seconds": [0.5],
        "decode_seconds": [2.0],
        "time_per_output_token_seconds": [0.2],
        "prompt_tokens": [100],
        "generation_tokens": [11],
    }
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
    assert batch.values == {"running": [3], "waiting": [6], "waiting_deferred": [4], "kv_cache_usage": [0.25]}


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
        f"Waiting: {batch.values['waiting'][0]} reqs, Deferred: {batch.values['waiting_deferred'][0]} reqs"
        in caplog.text
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
    assert "time_per_output_token_seconds" not in batch.values


def test_fresh_records_count_as_nothing_but_a_step() -> None:
    batch = Batch()
    fold_iteration(batch, IterationStats())
    fold_scheduler(batch, SchedulerStats())
    fold_mm_cache(batch, MultiModalCacheStats())
    assert batch.counters == {"scheduler_records": 1}


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
    assert batch.counters == {"scheduler_records": 1}
    assert not batch.values
