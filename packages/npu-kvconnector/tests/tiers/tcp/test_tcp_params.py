"""What requests carry: two dialects, and nothing that is neither."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_kvconnector.tiers.tcp.params import Source, destination_of, params_for, source_of

P2P = {"kv_request_id": "t", "remote_host": "p", "remote_port": 5710}


def test_both_dialects_name_a_source() -> None:
    assert source_of(params_for("t", "p", 5710)) == source_of({"remote_prefiller": P2P}) == Source("t", "p", 5710)


def test_a_server_that_may_have_the_blocks_is_asked_under_a_name_of_the_request_s_own() -> None:
    first, second = (source_of({"remote_kv_source": P2P}) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.address, first.is_probe) == ("p:5710", True)
    assert len({first.transfer, second.transfer, "t"}) == 3
    assert destination_of({"remote_kv_source": P2P}) is None


def test_who_computed_the_prompt_goes_before_who_may_have_it() -> None:
    other = P2P | {"remote_host": "q"}
    assert source_of({"remote_prefiller": P2P, "remote_kv_source": other}) == Source("t", "p", 5710)
    assert source_of(params_for("t", "p", 5710) | {"remote_kv_source": other}) == Source("t", "p", 5710)
    assert source_of({"remote_prefiller": {}, "remote_kv_source": other}) is None


def test_both_dialects_name_a_destination() -> None:
    ours, router_s = destination_of({"do_remote_decode": True}), destination_of({"remote_decoder": P2P})
    assert ours is not None
    assert ours.tells
    assert router_s is not None
    assert (router_s.transfer, router_s.tells) == ("t", False)
    assert destination_of({"do_remote_decode": True}) != ours  # a name of its own for each request


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_other_requests_have_neither(params: dict[str, Any] | None) -> None:
    assert source_of(params) is None
    assert destination_of(params) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_request_id": ""},
        {"kv_request_id": 7},
        {"kv_request_id": "t" * 300},
        {"kv_request_id": "x\ud800"},
        {"remote_host": "x\udfff"},
        {"remote_host": None},
        {"remote_port": "5710"},
        {"remote_port": True},
        {"remote_port": 0},
        {"remote_port": 1 << 20},
    ],
)
def test_what_cannot_be_a_source_is_none(wrong: dict[str, Any]) -> None:
    for role in ("remote_prefiller", "remote_kv_source"):
        assert source_of({role: P2P | wrong}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab\ud800", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=5), inner, max_size=3),
)
NAMES = st.sampled_from(
    ["do_remote_prefill", "do_remote_decode", "remote_prefiller", "remote_decoder", "remote_kv_source", *P2P]
)


@given(st.dictionaries(NAMES, JSON))
def test_nothing_that_a_client_sends_raises(params: dict[str, Any]) -> None:
    source_of(params)
    destination_of(params)
