"""RecoveringScheduler: how often a request whose chunks are on their way is looked up."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's; install npu-kvconnector[vllm]")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from npu_kvconnector.frame import scheduler as module
from npu_kvconnector.frame.scheduler import RecoveringScheduler
from npu_kvconnector.tiers.courtesy import Courtesy

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST = types.SimpleNamespace(request_id="request")
TOOK = 0.004  # seconds of a question


class Asked:
    """A scheduler over a manager of which each question takes a while, and what it was asked."""

    def __init__(self, answers: Iterator[int | None], *, asks_tiers: bool) -> None:
        self.now, self.questions = 100.0, 0
        self.manager = types.SimpleNamespace(arrivals=0, has_to_ask=False)
        self.scheduler = RecoveringScheduler.__new__(RecoveringScheduler)
        self.scheduler.manager, self.scheduler._waits, self.scheduler._room = self.manager, {}, None
        self.answers, self.asks_tiers = answers, asks_tiers

    def look_up(self, *_: Any) -> tuple[int | None, bool]:
        self.questions += 1
        self.now += TOOK
        self.manager.has_to_ask |= self.asks_tiers
        answer = next(self.answers)
        return answer, bool(answer)

    def ask(self) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(REQUEST, 0)


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Asked:
    asks_tiers, answers = request.param
    found = Asked(iter(answers), asks_tiers=asks_tiers)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(OffloadingConnectorScheduler, "get_num_new_matched_tokens", found.look_up)
    return found


@pytest.mark.parametrize("asked", [(False, [None, None, 64])], indirect=True)
def test_a_request_waits_for_an_arrival_or_for_a_hundred_times_what_a_question_takes(asked: Asked) -> None:
    assert [asked.ask() for _ in range(5)] == [(None, False)] * 5
    assert asked.questions == 1
    asked.now += 90 * TOOK
    asked.ask()
    assert asked.questions == 1
    asked.now += 11 * TOOK
    assert asked.ask() == (None, False)
    assert asked.questions == 2
    asked.manager.arrivals += 1
    assert asked.ask() == (64, True)
    assert asked.scheduler._waits == {}


@pytest.mark.parametrize("asked", [(True, [None, None, 64])], indirect=True)
def test_a_tier_that_has_not_answered_is_asked_in_every_step(asked: Asked) -> None:
    assert [asked.ask() for _ in range(3)] == [(None, False), (None, False), (64, True)]
    assert asked.questions == 3


@pytest.mark.parametrize("tokens", [0, 5])
def test_workers_and_tiers_are_told_whether_a_step_computes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = types.SimpleNamespace(load_jobs={}, store_jobs={}, jobs_to_flush=None)
    monkeypatch.setattr(OffloadingConnectorScheduler, "build_connector_meta", lambda *_: jobs)
    scheduler = RecoveringScheduler.__new__(RecoveringScheduler)
    scheduler._room = None
    meta = scheduler.build_connector_meta(
        types.SimpleNamespace(total_num_scheduled_tokens=tokens, preempted_req_ids=None)
    )
    assert meta.is_idle == Courtesy()._is_idle() == (tokens == 0)
