"""The p2p tier over TCP under the manager of tiers: what the guard lets through, and a reset in the middle."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.spec import NPUTieringSpec
from tests.support.offloading import offloading_config
from tests.support.remote_tier import BLOCK, block_of, key_of
from tests.support.stores import free_port
from tests.support.tcp_tier import secret_in, stranger

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.frame.manager import TierManager

NUMBERS = range(12)
KEYS = [key_of(number) for number in NUMBERS]
TIER = {"type": "p2p", "transport": "tcp", "host": "127.0.0.1", "peers": ["127.0.0.1"], "revision": "r"}


def open_manager(folder: Path, **options: Any) -> TierManager:
    tier = TIER | {"port": free_port(), "secret_file": secret_in(folder)} | options
    extra = OffloadConfig.parse({"secondary_tiers": [tier]}).for_vllm()
    config = offloading_config(block_bytes=BLOCK, secondary_tiers=extra["secondary_tiers"])
    return NPUTieringSpec(config).get_manager()


def step(manager: TierManager, *scheduled: str) -> None:
    manager.on_schedule_end(ScheduleEndContext(new_req_ids=scheduled, preempted_req_ids=()))
    time.sleep(0.005)


def compute(manager: TierManager, *, again: bool = False) -> dict[str, Any] | None:
    """Do what a worker's store to the host tier leads to, of a request for a peer; return what the answer carries."""
    request = ReqContext(req_id=f"prefill {time.monotonic_ns()}", kv_transfer_params={"do_remote_decode": True})
    manager.on_new_request(request)
    output = manager.prepare_store(KEYS, request)
    assert output is not None
    assert len(output.keys_to_store) == (0 if again else len(KEYS))
    memory = manager.primary_tier.get_kv_memoryview().cast("B")
    for number, chunk in zip(NUMBERS, [] if again else output.store_spec.chunk_ids, strict=not again):
        memory[chunk * BLOCK : (chunk + 1) * BLOCK] = block_of(number)
    memory.release()
    if not again:
        manager.complete_store(KEYS, request)
    params = manager.transfer_params(request)
    manager.on_request_finished(request)
    until = time.monotonic() + 20
    while manager.has_pending_work():
        step(manager)
        assert time.monotonic() < until
    return params


def load(manager: TierManager, params: dict[str, Any] | None) -> list[bytes] | None:
    """Ask for the blocks as a scheduler does; return them from the host tier, or None where they are not there."""
    request = ReqContext(req_id=f"decode {time.monotonic_ns()}", kv_transfer_params=params)
    manager.on_new_request(request)
    until = time.monotonic() + 20
    while True:
        answers = {manager.lookup(key, request) for key in KEYS}
        if answers <= {LookupResult.HIT, LookupResult.MISS}:
            break
        assert time.monotonic() < until
        step(manager)
    step(manager, request.req_id)
    blocks = None
    if LookupResult.MISS not in answers:
        chunks = manager.prepare_load(KEYS, request).chunk_ids
        rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        blocks = [rows[chunk].tobytes() for chunk in chunks]
        manager.complete_load(KEYS, request)
    manager.on_request_finished(request)
    return blocks


def test_blocks_go_to_another_server_also_where_they_were_in_the_host_tier_already(tmp_path: Path) -> None:
    one, two, three = (open_manager(tmp_path) for _ in range(3))
    blocks = [block_of(number) for number in NUMBERS]
    assert load(two, compute(one)) == blocks
    assert load(three, compute(one, again=True)) == blocks
    stats = two.get_stats()
    assert stats is not None
    hits = stats._values["vllm:kv_offload_tiering_chunk_hits"]
    assert sum(number for label, number in hits.items() if "1:p2p_tcp" in str(label)) == len(KEYS)
    for manager in (one, two, three):
        manager.shutdown()


def test_a_peer_that_is_gone_is_a_miss_and_the_request_goes_on(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, deadline=0.5)
    with stranger(tmp_path, len(KEYS)) as (process, params):
        process.kill()
        process.wait(10)
        assert load(manager, params) is None
        assert load(manager, params) is None
    manager.shutdown()


def test_a_reset_does_not_wait_for_peers(tmp_path: Path) -> None:
    one, two = open_manager(tmp_path), open_manager(tmp_path)
    params = compute(one)
    one.reset_cache()
    assert load(two, params) == [block_of(number) for number in NUMBERS]
    one.shutdown()
    two.shutdown()
