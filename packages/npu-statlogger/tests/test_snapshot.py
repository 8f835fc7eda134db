"""Lines: merging them in any order, and reading back what was written."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_statlogger.errors import FormatError
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
        counters=Counter(draw(st.dictionaries(st.sampled_from(["preemptions", "tokens.prompt"]), st.integers(1, 99)))),
    )
    for name in ("ttft_seconds", "e2e_seconds"):
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
    first = Snapshot(start=100, end=110, counters=Counter({"tokens.generation": 50, "prefix_cache.queries": 10}))
    second = Snapshot(
        start=115,
        end=120,
        counters=Counter({"tokens.generation": 50, "prefix_cache.queries": 10, "prefix_cache.hits": 5}),
    )
    rates = merged(first, second).rates()
    assert rates["generation_tokens_per_second"] == 5.0
    assert rates["prefix_cache_hit_rate"] == 0.25
    assert rates["draft_acceptance_rate"] is None


@pytest.mark.parametrize("data", [None, [], {}, {"schema": "other/1"}, {"schema": "npu-statlogger/1"}])
def test_a_foreign_line_is_refused(data: object) -> None:
    with pytest.raises(FormatError, match="npu-statlogger/1"):
        Snapshot.from_dict(data)
