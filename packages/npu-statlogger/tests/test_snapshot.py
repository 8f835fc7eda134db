"""Lines: merging them in any order, and reading back what was written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_statlogger.errors import FormatError
from npu_statlogger.metrics import Kind, describe
from npu_statlogger.snapshot import Snapshot


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    start = draw(st.floats(0, 1e6))
    snapshot = Snapshot(
        start=start,
        end=start + draw(st.floats(0, 100)),
        processes={draw(st.sampled_from(["a:1", "a:2"]))},
        models={"m"},
        engines=set(draw(st.lists(st.integers(0, 3), max_size=2))),
        counters=Counter(
            draw(st.dictionaries(st.sampled_from(["num_preemptions", "prompt_tokens"]), st.integers(1, 99)))
        ),
    )
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        snapshot.distributions[name].add(draw(st.lists(st.floats(0, 1e3), max_size=20)))
    return snapshot


def merged(*parts: Snapshot) -> Snapshot:
    whole = Snapshot()
    for part in parts:
        whole.merge(part)
    return whole


@given(snapshots(), snapshots(), snapshots())
def test_merging_is_associative_and_commutative(a: Snapshot, b: Snapshot, c: Snapshot) -> None:
    left = merged(merged(a, b), c).to_dict()
    assert left == merged(a, merged(b, c)).to_dict()
    assert left == merged(c, b, a).to_dict()


@given(snapshots())
def test_a_line_read_back_is_the_line_written(snapshot: Snapshot) -> None:
    line = snapshot.to_dict()
    assert Snapshot.from_dict(json.loads(json.dumps(line, allow_nan=False))).to_dict() == line


def test_rates_cover_the_whole_span_and_are_none_without_a_denominator() -> None:
    first = Snapshot(start=100, end=110, counters=Counter({"generation_tokens": 50, "prefix_cache_queries": 10}))
    second = Snapshot(
        start=115,
        end=120,
        counters=Counter({"generation_tokens": 50, "prefix_cache_queries": 10, "prefix_cache_hits": 5}),
    )
    rates = merged(first, second).rates()
    assert rates["generation_tokens_per_second"] == 5.0
    assert rates["prefix_cache_hit_rate"] == 0.25
    assert rates["draft_acceptance_rate"] is None


def test_a_span_of_next_to_nothing_has_no_rate() -> None:
    snapshot = Snapshot(start=0.0, end=8.9e-308, counters=Counter({"prompt_tokens": 17}))
    assert snapshot.rates()["prompt_tokens_total_per_second"] is None
    json.dumps(snapshot.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"schema": "other/1"},
        {"schema": "npu-statlogger/1"},
        {"schema": "npu-statlogger/2", "kind": "step"},
    ],
)
def test_a_foreign_line_is_refused(data: object) -> None:
    with pytest.raises(FormatError, match="npu-statlogger/"):
        Snapshot.from_dict(data)


def test_of_a_gauge_the_latest_value_of_each_engine_stays() -> None:
    parts = [Snapshot() for _ in range(3)]
    for part, (engine, time, value) in zip(parts, [("0", 1, 0.5), ("0", 2, 0.25), ("1", 1, 0.75)], strict=True):
        part.gauges[engine]["kv_cache_usage_perc"] = (time, value)
    assert merged(*parts).gauge("kv_cache_usage_perc") == {"0": 0.25, "1": 0.75}


def test_a_total_is_in_its_unit() -> None:
    snapshot = Snapshot(counters=Counter(preemptions=2), totals_nano=Counter(kv_offload_load_time=1_500_000_000))
    assert [snapshot.total(name) for name in ("kv_offload_load_time", "preemptions", "absent")] == [1.5, 2, 0]


def test_a_line_of_version_1_has_today_s_names() -> None:
    line = (Path(__file__).parent / "data" / "version_1.jsonl").read_text()
    snapshot = Snapshot.from_dict(json.loads(line))
    assert snapshot.counters == {
        "generation_tokens": 3, "num_preemptions": 1, "prefix_cache_hits": 60, "prefix_cache_queries": 100,
        "prompt_tokens": 100, "prompt_tokens_by_source.external_kv_transfer": 10, "prompt_tokens_cached": 70,
        "prompt_tokens_by_source.local_cache_hit": 60, "prompt_tokens_by_source.local_compute": 30,
        "request_success.length": 1, "scheduler_steps": 1, "admission_rejections.max_num_queued_reqs": 1,
    }  # fmt: skip
    assert snapshot.distributions["time_to_first_token_seconds"].maximum == 0.5
    assert snapshot.distributions["num_requests_waiting_by_reason.deferred"].maximum == 4
    named = {describe(kind, name) for kind, name in names_of(snapshot)}
    assert None not in named


def names_of(snapshot: Snapshot) -> list[tuple[Kind, str]]:
    return [(Kind.COUNTER, name) for name in snapshot.counters] + [
        (Kind.DISTRIBUTION, name) for name in snapshot.distributions
    ]
