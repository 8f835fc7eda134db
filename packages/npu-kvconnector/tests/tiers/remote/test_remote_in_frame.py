"""The remote tier under vLLM's own tiering manager: blocks go out as they reach the host tier, and come back on a hit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, block_of, key_of

STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
NUMBERS = range(12)
KEYS = [key_of(number) for number in NUMBERS]


def open_manager(options: dict[str, Any]) -> TieringOffloadingManager:
    tier = {"type": "RemoteTierManager", "module_path": "npu_kvconnector.tiers.remote.manager", "revision": "r"}
    config = offloading_config(block_bytes=BLOCK, secondary_tiers=[tier | options])
    manager = TieringOffloadingSpec(config).get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    return manager


def store(manager: TieringOffloadingManager) -> None:
    """Do what a worker's store to the host tier leads to."""
    request = ReqContext(req_id="store")
    manager.on_new_request(request)
    output = manager.prepare_store(KEYS, request)
    assert output is not None
    memory = manager.primary_tier.get_kv_memoryview().cast("B")
    for number, chunk in zip(NUMBERS, output.store_spec.chunk_ids, strict=True):
        memory[chunk * BLOCK : (chunk + 1) * BLOCK] = block_of(number)
    memory.release()
    manager.complete_store(KEYS, request)
    manager.on_request_finished(request)
    until = time.monotonic() + 20
    while manager.has_pending_work():
        manager.on_schedule_end(STEP)
        assert time.monotonic() < until
        time.sleep(0.005)


def load(manager: TieringOffloadingManager, name: str) -> list[bytes] | None:
    """Ask for the blocks as a scheduler does; return them from the host tier, or None where they are not there."""
    request = ReqContext(req_id=name)
    manager.on_new_request(request)
    until = time.monotonic() + 20
    while True:
        answers = {manager.lookup(key, request) for key in KEYS}
        if answers <= {LookupResult.HIT, LookupResult.MISS}:
            break
        manager.on_schedule_end(STEP)
        assert time.monotonic() < until
        time.sleep(0.005)
    manager.on_request_finished(request)
    if LookupResult.MISS in answers:
        return None
    chunks = manager.prepare_load(KEYS, request).chunk_ids
    rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    blocks = [rows[chunk].tobytes() for chunk in chunks]
    manager.complete_load(KEYS, request)
    return blocks


def test_blocks_go_out_and_come_back_to_another_server(options: dict[str, Any]) -> None:
    one, two = open_manager(options), open_manager(options)
    store(one)
    blocks = None
    for attempt in range(100):  # a server lists an object store now and then
        blocks = load(two, f"request-{attempt}")
        if blocks is not None:
            break
        time.sleep(0.05)
    assert blocks == [block_of(number) for number in NUMBERS]
    stats = two.get_stats()
    assert stats is not None
    regions = [Path(manager.primary_tier._mmap_region.mmap_path) for manager in (one, two)]
    assert all(region.exists() for region in regions)
    one.shutdown()
    two.shutdown()
    assert not any(region.exists() for region in regions)


def test_a_request_whose_load_fails_goes_on_without_it(valkey: Any) -> None:
    manager = open_manager({"url": valkey.url, "deadline": 0.3})
    store(manager)
    manager.reset_cache()
    valkey.stall()
    began = time.monotonic()
    assert load(manager, "request") is None
    assert time.monotonic() - began < 10
    valkey.resume()
    manager.shutdown()
