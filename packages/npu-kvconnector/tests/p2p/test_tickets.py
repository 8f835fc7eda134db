"""Tickets: blocks are read for the prompt they were signed for, once, and in time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_kvconnector.p2p.tickets import SIGNED, TICKET, Tickets, prompt_digest
from tests.support.fuzz import damaged

PROMPT = prompt_digest([1, 2, 3], None, None)
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": ((1, 2), (3,)),
    "remote_num_tokens": 3,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def signed(tickets: Tickets, **changes: Any) -> dict[str, Any]:
    """Return parameters with a ticket, as they come back through clients: as JSON."""
    return json.loads(json.dumps(tickets.sign(PARAMS, prompt=PROMPT, seconds=30) | changes))


def test_a_ticket_is_good_once() -> None:
    params = signed(Tickets(b"s" * 16))
    reader = Tickets(b"s" * 16)
    assert reader.refusal(params, prompt=PROMPT) is None
    assert reader.refusal(params, prompt=PROMPT) == "their ticket was used before"


def test_a_ticket_that_was_refused_is_not_used_up() -> None:
    clock = Clock()
    tickets = Tickets(b"s" * 16, clock)
    params = signed(tickets)
    assert tickets.refusal(params, prompt="another") == "their ticket is for another prompt"
    assert tickets.refusal(params, prompt=PROMPT) is None


def test_a_ticket_expires_and_is_forgotten() -> None:
    clock = Clock()
    tickets = Tickets(b"s" * 16, clock)
    for _ in range(50):
        assert tickets.refusal(signed(tickets), prompt=PROMPT) is None
        clock.now += 10
    late = signed(tickets)
    clock.now += 31
    assert tickets.refusal(late, prompt=PROMPT) == "their ticket has expired"
    assert len(tickets._used) <= 5


@pytest.mark.parametrize("name", [name for name in PARAMS if name != "do_remote_prefill"])
def test_what_is_read_from_where_cannot_be_changed(name: str) -> None:
    tickets = Tickets(b"s" * 16)
    for value in (None, "x", 7, [[9]]):
        if value != PARAMS[name]:
            assert "not signed" in (tickets.refusal(signed(tickets, **{name: value}), prompt=PROMPT) or "")


@pytest.mark.parametrize("ticket", [None, "x", [], {}, {"signature": 1}, {"signature": "é"}, {"signature": "\ud800"}])
def test_what_is_no_ticket_is_refused(ticket: Any) -> None:
    assert Tickets(b"s" * 16).refusal({**PARAMS, TICKET: ticket}, prompt=PROMPT)
    assert Tickets(b"s" * 16).refusal(PARAMS, prompt=PROMPT) == "they carry no ticket"


def test_parameters_may_be_nested_too_deep_to_sign() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    params = signed(Tickets(b"s" * 16)) | {"remote_block_ids": nested}
    assert "not signed" in (Tickets(b"s" * 16).refusal(params, prompt=PROMPT) or "")


def test_a_ticket_of_another_secret_is_refused() -> None:
    assert Tickets(b"t" * 16).refusal(signed(Tickets(b"s" * 16)), prompt=PROMPT)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # they take a second
@given(
    st.dictionaries(
        st.sampled_from([*SIGNED, TICKET]), st.recursive(st.none() | st.integers() | st.text("ab0"), st.lists)
    )
)
def test_no_parameters_pass_by_chance(params: dict[str, Any]) -> None:
    assert Tickets(b"s" * 16).refusal(params, prompt=PROMPT)


@pytest.mark.parametrize("rounds", [1_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_damaged_parameters_are_refused_or_say_the_same(rounds: int) -> None:
    chance, clock = random.Random(rounds), Clock()
    tickets = Tickets(b"s" * 16, clock)
    good = json.dumps(tickets.sign(PARAMS, prompt=PROMPT, seconds=30)).encode()
    passed = 0
    for _ in range(rounds):
        try:
            params = json.loads(damaged(good, chance))
        except ValueError:  # a server's framework refuses it
            continue
        if isinstance(params, dict) and Tickets(b"s" * 16, clock).refusal(params, prompt=PROMPT) is None:
            passed += 1
            assert [params[name] for name in SIGNED] == [json.loads(good)[name] for name in SIGNED]
    assert passed < rounds // 10


def test_a_prompt_s_digest_depends_on_all_that_decides_its_blocks() -> None:
    others = [[1, 2], [1, 2, 3, 4], [3, 2, 1]]
    digests = {prompt_digest(tokens, None, None) for tokens in others}
    digests |= {prompt_digest([1, 2, 3], *rest) for rest in ((None, "salt"), ("adapter", None), ("salt", None))}
    assert len(digests | {PROMPT}) == 7
