"""GuardedTier around a tier that does what each test says: raise, answer late, lie about its jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="tiers have vLLM's interface; install npu-kvconnector[vllm]")

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from npu_kvconnector import metrics
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.tiers.breaker import BreakerState
from npu_kvconnector.tiers.guard import GuardedTier
from npu_kvconnector.tiers.sealed import RefusedJob

CONFIG = GuardConfig(
    load_seconds=5, lookup_seconds=1, store_seconds=5, failures=3, open_seconds=10, max_open_seconds=40
)
A, B, C = b"a", b"b", b"c"


class Tier(SecondaryTierManager):
    """Answers what it was told to."""

    medium = Medium.STORAGE

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, memoryview(bytearray(64)).cast("B", (8, 8)), "odd")
        self.clock = clock
        self.answer: Any = LookupResult.HIT
        self.raises: set[str] = set()
        self.slow: set[str] = set()
        self.ended: list[JobResult] = []
        self.calls: list[str] = []

    def _act(self, name: str) -> None:
        self.calls.append(name)
        if name in self.slow:
            self.clock.now += 1
        if name in self.raises:
            msg = f"{name} is broken"
            raise OSError(msg)

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        self._act("lookup")
        return self.answer

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._act("submit_store")

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._act("submit_load")

    def get_finished_jobs(self) -> list[JobResult]:
        self._act("get_finished_jobs")
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._act("on_new_request")
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._act("on_request_finished")

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._act("on_schedule_end")

    def take_events(self) -> list[Any]:
        self._act("take_events")
        return []

    def touch(self, keys: Any, req_context: ReqContext) -> None:
        self._act("touch")

    def has_pending_work(self) -> bool:
        self._act("has_pending_work")
        return False

    def serve_external_requests(self, parent: ParentManager) -> None:
        self._act("serve_external_requests")
        self.job = parent.create_store_job([A], ReqContext("peer"))

    def decline_external_requests(self, parent: ParentManager) -> None:
        self._act("decline_external_requests")

    def get_stats(self) -> None:
        self._act("get_stats")

    def drain_jobs(self) -> None:
        self._act("drain_jobs")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(clock: Clock) -> Tier:
    return Tier(clock)


@pytest.fixture
def guard(tier: Tier, clock: Clock) -> GuardedTier:
    return GuardedTier(tier, CONFIG, label="1:odd", num_chunks=8, blocks_per_chunk=2, clock=clock)


def request(name: str = "r") -> ReqContext:
    return ReqContext(name)


def job(number: int, *keys: bytes, load: bool = True) -> TransferJob:
    return TransferJob(number, keys, np.arange(len(keys)), load, request())


def figures(guard: GuardedTier) -> dict[tuple[str, ...], float]:
    values = guard.get_stats().data["data"]
    return {(name, *labels[1:]): value for name, by in values.items() for labels, value in by.items() if value}


def test_it_looks_like_the_tier(guard: GuardedTier, tier: Tier) -> None:
    for name in ("tier_type", "medium", "locality", "cache_hit_source", "block_size_bytes", "bp_detector"):
        assert getattr(guard, name) == getattr(tier, name)
    assert guard.lookup(A, request()) is LookupResult.HIT
    guard.submit_load(job(1, A, B))
    tier.ended = [JobResult(1, success=True)]
    assert [result.success for result in guard.get_finished_jobs()] == [True]
    assert figures(guard) == {}


def test_whatever_a_tier_raises_is_a_miss_or_a_failed_job(guard: GuardedTier, tier: Tier) -> None:
    class Everything(set):
        def __contains__(self, name: object) -> bool:
            return True

    tier.raises = Everything()
    assert guard.lookup(A, request()) is LookupResult.MISS
    guard.submit_load(job(1, A))
    guard.submit_store(job(2, B, load=False))
    assert guard.has_pending_work()
    assert sorted((result.job_id, result.success) for result in guard.get_finished_jobs()) == [(1, False), (2, False)]
    assert guard.on_new_request(request()) == RequestOffloadingContext()
    guard.on_request_finished(request())
    guard.on_schedule_end(ScheduleEndContext((), ()))
    guard.touch([A], request())
    guard.serve_external_requests(NoParent())
    assert list(guard.take_events()) == []
    assert not guard.has_pending_work()
    assert figures(guard)[metrics.FAILED_CALLS, "lookup"] == 1
    assert guard.loads.state is BreakerState.OPEN


def test_a_skipped_tier_is_left_alone_until_one_load_has_shown_that_it_works(
    guard: GuardedTier, tier: Tier, clock: Clock
) -> None:
    for number in range(CONFIG.failures):
        assert guard.lookup(bytes([number]), request()) is LookupResult.HIT
        guard.submit_load(job(number, bytes([number])))
        tier.ended = [JobResult(number, success=False)]
        guard.get_finished_jobs()
    tier.calls.clear()
    for _ in range(50):
        assert guard.lookup(A, request()) is LookupResult.MISS
        guard.get_finished_jobs()
        guard.on_schedule_end(ScheduleEndContext((), ()))
        guard.touch([A], request())
    assert tier.calls == []
    assert figures(guard)[metrics.BREAKER_STATE, "load"] == BreakerState.OPEN
    clock.now += CONFIG.open_seconds
    assert guard.lookup(A, request()) is LookupResult.HIT
    guard.submit_load(job(9, A))
    assert guard.lookup(B, request()) is LookupResult.MISS
    tier.ended = [JobResult(9, success=True)]
    guard.get_finished_jobs()
    assert guard.lookup(B, request()) is LookupResult.HIT
    assert metrics.BREAKER_STATE not in {name for name, *_ in figures(guard)}


def test_loads_go_on_while_stores_fail(guard: GuardedTier, tier: Tier) -> None:
    for number in range(CONFIG.failures):
        guard.submit_store(job(number, A, load=False))
        tier.ended = [JobResult(number, success=False)]
        guard.get_finished_jobs()
    assert not guard.accepts(1)
    assert guard.lookup(A, request()) is LookupResult.HIT
    assert figures(guard)[metrics.SKIPPED_CHUNKS, "store"] == 1


def test_what_could_not_be_loaded_is_not_asked_for_again_until_it_is_stored(
    guard: GuardedTier, tier: Tier, clock: Clock
) -> None:
    guard.submit_load(job(1, A, B, C))
    tier.ended = [JobResult(1, success=False, successful_keys=(B, b"another"))]
    (result,) = guard.get_finished_jobs()
    assert result.successful_keys == (B,)
    assert [guard.lookup(key, request()) for key in (A, B, C)] == [
        LookupResult.MISS,
        LookupResult.HIT,
        LookupResult.MISS,
    ]
    assert figures(guard)[metrics.RECOMPUTED_BLOCKS,] == 4
    guard.submit_store(job(2, A, load=False))
    tier.ended = [JobResult(2, success=True)]
    guard.get_finished_jobs()
    assert [guard.lookup(key, request()) for key in (A, C)] == [LookupResult.HIT, LookupResult.MISS]
    clock.now += CONFIG.max_open_seconds
    assert guard.lookup(C, request()) is LookupResult.HIT


def test_chunks_of_each_cache_group_count_as_recomputed(guard: GuardedTier, tier: Tier) -> None:
    of_two_groups = [make_offload_key(A, 0), make_offload_key(A, 1)]
    guard.submit_load(job(1, *of_two_groups))
    tier.ended = [JobResult(1, success=False, successful_keys=of_two_groups[1:])]
    guard.get_finished_jobs()
    assert figures(guard)[metrics.RECOMPUTED_BLOCKS,] == 2
    assert [guard.lookup(key, request()) for key in of_two_groups] == [LookupResult.MISS, LookupResult.HIT]


def test_a_late_load_is_waited_for_no_more_and_ends_once(guard: GuardedTier, tier: Tier, clock: Clock) -> None:
    guard.submit_load(job(1, A))
    assert not guard.is_overdue(A)
    clock.now += CONFIG.load_seconds + 0.1
    assert guard.is_overdue(A)
    assert list(guard.get_finished_jobs()) == []
    assert list(guard.get_finished_jobs()) == []
    assert figures(guard) == {(metrics.OVERDUE_JOBS, "load"): 1, (metrics.RECOMPUTED_BLOCKS,): 2}
    tier.ended = [JobResult(1, success=True)]
    assert [result.success for result in guard.get_finished_jobs()] == [True]
    assert not guard.is_overdue(A)


def test_a_request_waits_for_an_answer_only_so_long(guard: GuardedTier, tier: Tier, clock: Clock) -> None:
    tier.answer = LookupResult.RETRY
    assert guard.lookup(A, request()) is LookupResult.RETRY
    clock.now += CONFIG.lookup_seconds + 0.1
    assert [guard.lookup(key, request()) for key in (A, B, C)] == [LookupResult.MISS] * 3
    assert guard.lookup(A, request("later")) is LookupResult.RETRY
    assert guard.loads.failures == 1
    tier.answer = LookupResult.HIT
    assert guard.lookup(A, request()) is LookupResult.HIT
    tier.answer = LookupResult.RETRY
    guard.on_schedule_end(ScheduleEndContext((), ("r",)))  # preempted: it will ask anew
    assert guard.lookup(A, request()) is LookupResult.RETRY


def test_a_tier_that_was_quick_and_is_silent_is_waited_for_less(tier: Tier, clock: Clock) -> None:
    guard = GuardedTier(tier, CONFIG, label="1:odd", num_chunks=8, blocks_per_chunk=2, learns=True, clock=clock)
    for number in range(20):
        tier.answer = LookupResult.RETRY
        assert guard.lookup(A, request(f"{number}")) is LookupResult.RETRY
        clock.now += 0.01
        tier.answer = LookupResult.HIT
        assert [guard.lookup(key, request(f"{number}")) for key in (A, B)] == [LookupResult.HIT] * 2
        clock.now += 3.0  # chunks are loaded, and asked for meanwhile
        assert guard.lookup(A, request(f"{number}")) is LookupResult.HIT
        guard.on_schedule_end(ScheduleEndContext((f"{number}",), ()))
    for number in range(100):  # what came in a long step may have been there for all of it, or for none
        tier.answer = LookupResult.RETRY
        assert guard.lookup(A, request(f"long-{number}")) is LookupResult.RETRY
        clock.now += 0.4
        tier.answer = LookupResult.HIT
        assert guard.lookup(A, request(f"long-{number}")) is LookupResult.HIT
    tier.answer = LookupResult.RETRY
    assert guard.lookup(A, request("r")) is LookupResult.RETRY
    clock.now += 0.09
    assert guard.lookup(A, request("r")) is LookupResult.RETRY
    clock.now += 0.02
    assert guard.lookup(A, request("r")) is LookupResult.MISS
    assert guard.loads.failures == 1


def test_of_a_silent_tier_that_is_tried_again_one_request_waits_for_an_answer(
    guard: GuardedTier, tier: Tier, clock: Clock
) -> None:
    tier.answer = LookupResult.RETRY
    names = [str(number) for number in range(CONFIG.failures)]
    assert [guard.lookup(A, request(name)) for name in names] == [LookupResult.RETRY] * len(names)
    clock.now += CONFIG.lookup_seconds + 0.1
    assert [guard.lookup(A, request(name)) for name in names] == [LookupResult.MISS] * len(names)
    assert guard.loads.state is BreakerState.OPEN
    for name in names:
        guard.on_request_finished(request(name))
    clock.now += CONFIG.open_seconds
    assert [guard.lookup(A, request(name)) for name in "xyx"] == [
        LookupResult.RETRY,
        LookupResult.MISS,
        LookupResult.RETRY,
    ]
    clock.now += CONFIG.lookup_seconds + 0.1
    assert guard.lookup(A, request("x")) is LookupResult.MISS
    assert guard.loads.state is BreakerState.OPEN
    clock.now += 2 * CONFIG.open_seconds
    guard.on_schedule_end(ScheduleEndContext(("x",), ()))
    assert guard.lookup(A, request("y")) is LookupResult.RETRY
    guard.on_request_finished(request("y"))  # it was given up
    assert guard.lookup(A, request("z")) is LookupResult.RETRY


def test_calls_that_keep_the_scheduler_open_the_breaker(guard: GuardedTier, tier: Tier) -> None:
    tier.slow = {"lookup"}
    for _ in range(CONFIG.failures):
        guard.lookup(A, request())
    assert guard.lookup(A, request()) is LookupResult.MISS
    assert figures(guard)[metrics.FAILED_CALLS, "lookup"] == CONFIG.failures


def test_no_more_is_stored_than_may_be_pending(guard: GuardedTier, tier: Tier) -> None:
    assert guard.accepts(100)  # alone; it would never be stored otherwise
    guard.submit_store(job(1, A, load=False))
    assert guard.accepts(3)
    assert not guard.accepts(4)
    tier.ended = [JobResult(1, success=True)]
    guard.get_finished_jobs()
    assert guard.accepts(2)


def test_a_try_that_is_given_up_does_not_keep_the_breaker_half_open(guard: GuardedTier, clock: Clock) -> None:
    """As by a reset, of a tier that does not end its jobs."""
    while guard.stores.allows():
        guard.stores.fail()
    clock.now += CONFIG.open_seconds
    assert guard.accepts(1)
    guard.submit_store(job(1, A, load=False))
    assert not guard.accepts(1)
    guard.abandon(1)
    assert guard.stores.state is BreakerState.OPEN
    clock.now += CONFIG.max_open_seconds
    assert guard.accepts(1)


def test_stores_that_are_refused_open_no_breaker_and_decide_no_try(
    guard: GuardedTier, tier: Tier, clock: Clock
) -> None:
    def store(result: JobResult) -> None:
        assert guard.accepts(1)
        guard.submit_store(job(result.job_id, A, load=False))
        tier.ended = [result]
        guard.get_finished_jobs()

    for number in range(2 * CONFIG.failures):
        store(RefusedJob(number, success=False))
    assert (guard.stores.state, guard.stores.failures) == (BreakerState.CLOSED, 0)
    while guard.stores.allows():
        guard.stores.fail()
    clock.now += CONFIG.open_seconds
    for number in (100, 101):
        store(RefusedJob(number, success=False))
        assert guard.stores.state is BreakerState.HALF_OPEN
    store(JobResult(102, success=True))
    assert guard.stores.state is BreakerState.CLOSED


def test_jobs_that_do_not_exist_are_left_out(guard: GuardedTier, tier: Tier) -> None:
    guard.submit_load(job(1, A))
    tier.ended = [JobResult(1, success=True), JobResult(1, success=True), JobResult(77, success=True)]
    assert [result.job_id for result in guard.get_finished_jobs()] == [1]
    assert figures(guard)[metrics.FAILED_CALLS, "get_finished_jobs"] == 2


def test_peers_are_served_while_loads_fail_and_declined_when_that_fails(
    guard: GuardedTier, tier: Tier, clock: Clock
) -> None:
    while guard.loads.allows():
        guard.loads.fail()
    guard.get_finished_jobs()
    guard.serve_external_requests(NoParent())
    tier.ended = [JobResult(tier.job.job_id, success=True)]
    assert [result.job_id for result in guard.get_finished_jobs()] == [5]  # not a moment later
    guard.serve_external_requests(NoParent())
    tier.ended = [JobResult(tier.job.job_id, success=False)]
    guard.get_finished_jobs()
    assert guard.accepts(1)
    tier.raises = {"serve_external_requests"}
    for _ in range(5):
        guard.serve_external_requests(NoParent())
    served = CONFIG.failures - 1  # one has failed before
    assert tier.calls[-5:] == ["serve_external_requests"] * served + ["decline_external_requests"] * (5 - served)
    assert figures(guard)[metrics.BREAKER_STATE, "serve"] == BreakerState.OPEN
    assert figures(guard)[metrics.BREAKER_STATE, "load"] == BreakerState.OPEN
    tier.raises = set()
    clock.now += CONFIG.open_seconds
    guard.serve_external_requests(NoParent())
    assert tier.calls[-1] == "serve_external_requests"
    tier.ended = [JobResult(tier.job.job_id, success=True)]
    guard.get_finished_jobs()
    assert guard.serves.state is BreakerState.CLOSED


class NoParent(ParentManager):
    """A manager for one peer's store."""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT

    def create_store_job(self, keys: Any, req_context: ReqContext) -> TransferJob:
        return job(5, *keys, load=False)

    def on_request_finished(self, req_context: ReqContext) -> None:
        pass


def test_jobs_that_a_tier_starts_for_a_peer_are_known(guard: GuardedTier, tier: Tier) -> None:
    guard.serve_external_requests(NoParent())
    tier.ended = [JobResult(tier.job.job_id, success=True)]
    assert [result.job_id for result in guard.get_finished_jobs()] == [5]
