"""TierManager: what happens in the index when transfers fail, with vLLM's own jobs and a real region."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="the manager is vLLM's; install npu-kvconnector[vllm]")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

from npu_kvconnector import metrics
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.frame.manager import HostTier, TierManager
from npu_kvconnector.frame.metadata import JobsMetadata
from npu_kvconnector.tiers.guard import GuardedTier
from npu_kvconnector.tiers.host import HostRegion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_offload.tiering.base import JobResult

KEYS = [bytes([number]) + b"\0\0\0\0" for number in range(6)]
STEP = ScheduleEndContext((), ())


def manager_of(store_threshold: int = 0, *, with_tier: bool = False) -> TierManager:
    region = HostRegion(f"test-{uuid.uuid4()}", num_chunks=4, rank=None, kv_bytes_per_chunk=4096, cpu_page_size=4096)
    host = HostTier(
        region,
        eviction_policy="lru",
        cache_policy_module_path=None,
        enable_events=True,
        store_threshold=store_threshold,
        max_tracker_size=100,
    )
    tiers = [Silent(None, host.get_kv_memoryview(), "silent")] if with_tier else []
    guards = [GuardedTier(tier, GuardConfig(), label="1:silent", num_chunks=4, blocks_per_chunk=3) for tier in tiers]
    return TierManager(host, guards, blocks_per_chunk=3)


class Silent(ExampleSecondaryTierManager):
    """Takes jobs and never tells of their end."""

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def get_finished_jobs(self) -> list[JobResult]:
        return []

    def drain_jobs(self) -> None:
        msg = "it does not work"
        raise OSError(msg)


@pytest.fixture
def manager() -> Iterator[TierManager]:
    manager = manager_of()
    yield manager
    manager.shutdown()


def store(manager: TierManager, keys: list[bytes], request: ReqContext) -> list[bytes]:
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    assert output is not None
    return output.keys_to_store


def removed(manager: TierManager) -> list[bytes]:
    return [key for event in manager.take_events() if event.removed for key in event.keys]


def test_a_failed_store_is_no_hit_and_can_be_stored_again(manager: TierManager) -> None:
    first, second = ReqContext("first"), ReqContext("second")
    assert store(manager, KEYS[:2], first) == KEYS[:2]
    manager.note_failure(KEYS[:2], "first", is_store=True)
    manager.complete_store(KEYS[:2], first)
    assert [manager.lookup(key, second) for key in KEYS[:2]] == [LookupResult.MISS] * 2
    assert store(manager, KEYS[:4], second) == KEYS[:4]
    manager.complete_store(KEYS[:4], second)
    assert [manager.lookup(key, second) for key in KEYS[:4]] == [LookupResult.HIT] * 4


def test_chunks_of_a_failed_load_are_dropped_and_their_request_goes_without(manager: TierManager) -> None:
    first, second = ReqContext("first"), ReqContext("second")
    store(manager, KEYS[:3], first)
    manager.complete_store(KEYS[:3], first)
    manager.on_new_request(second)
    manager.prepare_load(KEYS[:2], second)
    for _ in range(2):  # one worker after the other
        manager.note_failure(KEYS[:2], "second", is_store=False)
    assert manager.lookup(KEYS[2], second) is LookupResult.MISS
    assert manager.lookup(KEYS[0], first) is LookupResult.HIT
    manager.complete_load(KEYS[:2], second)
    assert [manager.lookup(key, first) for key in KEYS[:3]] == [LookupResult.MISS, LookupResult.MISS, LookupResult.HIT]
    assert sorted(removed(manager)) == KEYS[:2]
    stats = manager.get_stats()
    assert stats.data["data"][metrics.RECOMPUTED_BLOCKS] == {(metrics.HOST_LABEL,): 6}
    manager.on_request_finished(second)
    manager.on_new_request(ReqContext("second"))
    assert manager.lookup(KEYS[2], ReqContext("second")) is LookupResult.HIT


def test_requests_wait_while_the_tiers_behind_are_held(manager: TierManager) -> None:
    first, second = ReqContext("first"), ReqContext("second")
    store(manager, KEYS[:1], first)
    manager.complete_store(KEYS[:1], first)
    manager.is_held = True
    assert manager.lookup(KEYS[0], second) is LookupResult.RETRY
    manager.is_held = False
    assert manager.lookup(KEYS[0], second) is LookupResult.HIT


def test_a_chunk_that_another_reads_stays(manager: TierManager) -> None:
    first, second = ReqContext("first"), ReqContext("second")
    store(manager, KEYS[:1], first)
    manager.complete_store(KEYS[:1], first)
    manager.on_new_request(second)
    manager.prepare_load(KEYS[:1], first)
    manager.prepare_load(KEYS[:1], second)
    manager.note_failure(KEYS[:1], "second", is_store=False)
    manager.complete_load(KEYS[:1], second)
    manager.complete_load(KEYS[:1], first)
    assert manager.lookup(KEYS[0], first) is LookupResult.HIT


def test_dropped_chunks_make_room(manager: TierManager) -> None:
    requests = [ReqContext(str(number)) for number in range(20)]
    for request in requests:
        stored = store(manager, KEYS[:4], request)
        manager.complete_store(stored, request)
        manager.prepare_load(KEYS[:4], request)
        manager.note_failure(KEYS[:4], request.req_id, is_store=False)
        manager.complete_load(KEYS[:4], request)
        assert stored == KEYS[:4]


def test_promotions_are_no_offers_that_a_threshold_counts() -> None:
    manager = manager_of(store_threshold=2)
    request = ReqContext("request")
    assert store(manager, KEYS[:1], request) == []
    promoted = manager.primary_tier.prepare_write(KEYS[1:2], request)
    assert promoted.keys_to_store == KEYS[1:2]
    assert store(manager, KEYS[:1], request) == KEYS[:1]
    manager.shutdown()


def test_a_reset_leaves_chunks_alone_that_a_tier_does_not_give_back() -> None:
    manager = manager_of(with_tier=True)
    first, second = ReqContext("first"), ReqContext("second")
    store(manager, KEYS[:2], first)
    manager.complete_store(KEYS[:2], first)
    assert manager.has_pending_work()
    manager.on_request_finished(first)
    manager.reset_cache()
    assert not manager.has_pending_work()
    assert manager.lookup(KEYS[0], second) is LookupResult.MISS
    manager.on_new_request(second)
    output = manager.prepare_store(KEYS[2:4], second)
    assert sorted(output.store_spec.chunk_ids.tolist()) == [2, 3]
    assert manager.prepare_store(KEYS[4:5], second) is None
    manager.shutdown()


def test_workers_reports_are_joined() -> None:
    one, other = JobsMetadata({1: 1, 2: 1}, failed_jobs={2}), JobsMetadata({1: 1}, failed_jobs={1})
    merged = one.aggregate(other)
    assert (merged.completed_jobs, merged.failed_jobs) == ({1: 2, 2: 1}, {1, 2})
