"""Lines of single requests and steps: who has one, and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.records import Sampler

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats


def sampler(**settings: object) -> Sampler:
    return Sampler(StatLoggerConfig(**settings), "host:1", "m")  # type: ignore[arg-type]


def many(request: FinishedRequestStats, number: int) -> list[FinishedRequestStats]:
    return [type(request)(**(vars(request) | {"request_id": f"request-{each}"})) for each in range(number)]


def test_nothing_is_sampled_unless_asked_for(iteration_stats: IterationStats, scheduler_stats: SchedulerStats) -> None:
    idle = sampler()
    assert not idle.on
    assert idle.requests(0, 1.0, iteration_stats) == []
    assert idle.step(0, 1.0, scheduler_stats, iteration_stats) == []


def test_a_request_s_line_says_what_vllm_measured(iteration_stats: IterationStats) -> None:
    (line,) = sampler(requests=1.0).requests(3, 1.0, iteration_stats)
    end = iteration_stats.iteration_timestamp
    assert (line.time, line.arrival) == (end, pytest.approx(end - 4.0))
    assert (line.engine, line.model, line.process, line.weight) == (3, "m", "host:1", 1)
    assert (line.prompt_tokens, line.cached_tokens, line.generation_tokens, line.max_tokens) == (100, 70, 11, 11)
    assert line.finish_reason == "length"
    seconds = (line.queue_seconds, line.prefill_seconds, line.decode_seconds, line.inference_seconds)
    assert seconds == pytest.approx((1.0, 0.5, 2.0, 2.5))
    assert line.first_token_seconds == pytest.approx(1.5)
    assert line.time_per_output_token_seconds == pytest.approx(0.2)


def test_requests_are_named_as_the_setting_says(iteration_stats: IterationStats) -> None:
    names = [
        sampler(requests=1.0, request_ids=ids).requests(0, 1.0, iteration_stats)[0].request_id
        for ids in ("plain", "hash", "none")
    ]
    assert names[0] == "request-1"
    assert len(names[1]) == 16
    assert int(names[1], 16)
    assert names[2] == ""


def test_a_fraction_is_the_same_in_every_process_and_its_weights_estimate_the_whole(
    iteration_stats: IterationStats,
) -> None:
    iteration_stats.finished_requests = many(iteration_stats.finished_requests[0], 4000)
    one, other = (sampler(requests=0.1, request_ids="plain").requests(0, 1.0, iteration_stats) for _ in range(2))
    assert [line.request_id for line in one] == [line.request_id for line in other]
    assert sum(line.weight for line in one) == pytest.approx(4000, rel=0.15)


def test_slow_requests_have_a_line_each_and_the_others_are_sampled(iteration_stats: IterationStats) -> None:
    requests = many(iteration_stats.finished_requests[0], 2000)
    for request in requests[:50]:
        request.e2e_latency = 60.0
    iteration_stats.finished_requests = requests
    lines = sampler(requests=0.25, slow_seconds=30.0).requests(0, 1.0, iteration_stats)
    assert sum(line.weight == 1 for line in lines) == 50
    assert sum(line.weight for line in lines) == pytest.approx(2000, rel=0.15)
    assert len(sampler(slow_seconds=30.0).requests(0, 1.0, iteration_stats)) == 50


def test_a_step_s_line(iteration_stats: IterationStats, scheduler_stats: SchedulerStats) -> None:
    every = sampler(steps=1.0)
    (first,) = every.step(0, 10.0, scheduler_stats, iteration_stats)
    (other_engine,) = every.step(1, 10.5, scheduler_stats, None)
    (second,) = every.step(0, 11.0, scheduler_stats, None)
    assert (first.seconds, other_engine.seconds, second.seconds) == (0, 0, 1)
    assert (first.running, first.waiting, first.deferred, first.kv_cache_usage) == (3, 6, 4, 0.25)
    assert (first.prompt_tokens, first.cached_tokens, first.generation_tokens) == (30, 70, 3)
    assert (first.first_tokens, first.finished, first.preemptions) == (1, 1, 1)
    assert (second.generation_tokens, second.finished) == (0, 0)


def test_a_fraction_of_the_steps_keeps_their_true_distances(scheduler_stats: SchedulerStats) -> None:
    some = sampler(steps=0.1)
    lines = [line for number in range(5000) for line in some.step(0, number * 0.5, scheduler_stats, None)]
    assert sum(line.weight for line in lines) == pytest.approx(5000, rel=0.2)
    assert {line.seconds for line in lines} <= {0.0, 0.5}


def test_a_record_of_a_later_vllm_gives_a_line_of_what_is_known() -> None:
    class Unknown:
        finished_requests = (object(),)

    (line,) = sampler(requests=1.0).requests(0, 7.0, Unknown())
    assert (line.time, line.prompt_tokens, line.finish_reason) == (7, 0, "unknown")
