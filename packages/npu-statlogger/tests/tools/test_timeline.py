"""Figures over time: exact in sum, right in rate, bounded in memory."""

from __future__ import annotations

import pytest

from npu_statlogger.fold import Batch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.timeline import Timeline


def line(start: float, end: float, tokens: int, latency: float | None = None) -> Snapshot:
    snapshot, batch = Snapshot(start, end), Batch()
    batch.counters["generation_tokens"] = tokens
    if latency is not None:
        batch.values["latency"] = [latency]
    snapshot.add(batch)
    return snapshot


def test_lines_that_begin_at_different_moments_add_up_to_the_sum_of_their_rates() -> None:
    timeline = Timeline(100)
    for index in range(30):
        timeline.add(line(1000 + 10 * index, 1010 + 10 * index, 50))
        timeline.add(line(1003.7 + 10 * index, 1013.7 + 10 * index, 70))
    rates = [span.rate("generation_tokens") for span in timeline]
    assert rates[1:-1] == pytest.approx([12.0] * (len(rates) - 2))
    assert sum(span.amounts["generation_tokens"] for span in timeline) == pytest.approx(30 * 120)


def test_spans_are_bounded_and_nothing_is_lost() -> None:
    timeline = Timeline(64, sketches=["latency"], means=["latency"])
    for index in range(5000):
        timeline.add(line(index, index + 1, 3, latency=0.5))
    spans = list(timeline)
    assert 32 <= len(spans) <= 64
    assert sum(span.amounts["generation_tokens"] for span in spans) == pytest.approx(15000)
    assert sum(span.sketches["latency"].count for span in spans) == 5000
    assert {span.mean("latency") for span in spans} == {0.5}


def test_a_span_at_the_edge_counts_only_the_time_that_lines_cover() -> None:
    timeline = Timeline(10)
    timeline.add(line(1000.5, 1001.25, 75))
    assert [span.rate("generation_tokens") for span in timeline] == pytest.approx([100.0, 100.0])


def test_a_pause_leaves_no_spans() -> None:
    timeline = Timeline(10)
    timeline.add(line(1000, 1001, 1))
    timeline.add(line(1100, 1101, 1))
    assert [span.start for span in timeline] == [1000, 1100]


@pytest.mark.parametrize("span", [(2e9, 1e9), (1e9, 2e9)])
def test_a_clock_that_was_set_does_not_stretch_a_line_over_years(span: tuple[float, float]) -> None:
    timeline = Timeline(10)
    timeline.add(line(*span, 7))
    assert timeline.width == 1.0
    assert sum(each.amounts["generation_tokens"] for each in timeline) == 7


def test_what_is_forgotten_is_gone_and_the_rest_is_whole() -> None:
    timeline = Timeline(1000)
    for index in range(100):
        timeline.add(line(index, index + 1, 3))
    timeline.forget(90.5)
    assert [span.start for span in timeline] == list(range(91, 100))
    assert [span.rate("generation_tokens") for span in timeline] == [3.0] * 9
