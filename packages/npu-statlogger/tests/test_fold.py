"""Folding vLLM's own records: every field that the lines rest on is still there and means what we think."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from npu_statlogger.fold import fold_iteration, fold_mm_cache, fold_scheduler
from npu_statlogger.snapshot import Snapshot


def test_an_iteration_gives_latencies_tokens_preemptions_and_finished_requests(iteration_stats: IterationStats) -> None:
    snapshot = Snapshot()
    fold_iteration(snapshot, iteration_stats)
    assert snapshot.counters == {
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
    assert set(snapshot.distributions) == set(expected)
    for name, values in expected.items():
        sketch = snapshot.distributions[name]
        assert (sketch.count, sketch.minimum, sketch.maximum) == (
            len(values),
            pytest.approx(min(values)),
            pytest.approx(max(values)),
        )


def test_a_scheduler_record_gives_load_and_cache_hits(scheduler_stats: SchedulerStats) -> None:
    scheduler_stats.connector_prefix_cache_stats = PrefixCacheStats(requests=1, queries=40, hits=10)
    scheduler_stats.spec_decoding_stats = SpecDecodingStats(num_spec_tokens=2, num_draft_tokens=8, num_accepted_tokens=6)
    snapshot = Snapshot()
    fold_scheduler(snapshot, scheduler_stats)
    rates = snapshot.rates()
    assert rates["prefix_cache_hit_rate"] == 0.6
    assert rates["external_prefix_cache_hit_rate"] == 0.25
    assert rates["draft_acceptance_rate"] == 0.75
    assert snapshot.distributions["running"].maximum == 3
    assert snapshot.distributions["waiting"].maximum == 2
    assert snapshot.distributions["kv_cache_usage"].maximum == 0.25


def test_a_request_of_one_token_has_no_time_per_output_token(iteration_stats: IterationStats) -> None:
    iteration_stats.finished_requests[0].mean_time_per_output_token = 0
    snapshot = Snapshot()
    fold_iteration(snapshot, iteration_stats)
    assert "time_per_output_token_seconds" not in snapshot.distributions


def test_fresh_records_count_as_nothing_but_a_step() -> None:
    snapshot = Snapshot()
    fold_iteration(snapshot, IterationStats())
    fold_scheduler(snapshot, SchedulerStats())
    fold_mm_cache(snapshot, MultiModalCacheStats())
    assert snapshot.counters == {"scheduler_records": 1}


def test_multimodal_cache_hits() -> None:
    stats = MultiModalCacheStats()
    stats.record(num_queries=4, num_hits=1)
    snapshot = Snapshot()
    fold_mm_cache(snapshot, stats)
    assert snapshot.rates()["mm_cache_hit_rate"] == 0.25


def test_a_field_that_a_later_vllm_lacks_is_left_out() -> None:
    snapshot = Snapshot()
    fold_iteration(snapshot, object())
    fold_scheduler(snapshot, object())
    assert snapshot.counters == {"scheduler_records": 1}
    assert not snapshot.distributions
