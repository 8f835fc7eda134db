"""A remote tier of blocks of 4 KiB, driven as vLLM's scheduler drives it."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from npu_kvconnector.tiers.remote.manager import RemoteTierManager
from tests.support.offloading import offloading_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest
    from vllm.v1.kv_offload.base import OffloadKey

    from tests.support.stores import S3Server

__all__ = ["BLOCK", "Server", "block_of", "finished_job", "job_of", "key_of", "s3_options"]

BLOCK, CHUNKS = 4096, 64


def key_of(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def block_of(number: int, size: int = BLOCK) -> bytes:
    """Return a block of finite bfloat16 values."""
    values = np.random.default_rng(number).standard_normal(size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def job_of(number: int, blocks: Sequence[int], request: ReqContext, *, is_promotion: bool) -> TransferJob:
    """Return a transfer of these blocks, from or into the chunks of their numbers."""
    keys, chunks = [key_of(block) for block in blocks], np.array([block % CHUNKS for block in blocks], np.int32)
    return TransferJob(number, keys, chunks, is_promotion, request)


def finished_job(tier: SecondaryTierManager) -> JobResult:
    """Wait for the one job that a tier has."""
    until = time.monotonic() + 30
    while True:
        finished = list(tier.get_finished_jobs())
        if finished:
            (result,) = finished
            return result
        assert time.monotonic() < until
        time.sleep(0.002)


class Server:
    """What one server does with its remote tier: a host tier of 64 chunks, and the scheduler's steps."""

    def __init__(self, options: dict[str, Any], **config: Any) -> None:
        self.memory = np.zeros((CHUNKS, BLOCK), np.uint8)
        spec = CPUOffloadingSpec(offloading_config(block_bytes=BLOCK, **config))
        self.tier = RemoteTierManager(spec, memoryview(self.memory), "remote", **{"revision": "r", **options})
        self._jobs = 0
        self._requests = 0

    def store(self, *numbers: int) -> JobResult:
        """Store blocks, which lie in the chunks of their numbers."""
        for number in numbers:
            self.memory[number % CHUNKS] = np.frombuffer(block_of(number), np.uint8)
        self.tier.submit_store(self.job(numbers, is_promotion=False))
        return self.finish()

    def load(self, *numbers: int) -> tuple[JobResult, list[bytes]]:
        """Load blocks into chunks that hold something else; return what is in them then."""
        for number in numbers:
            self.memory[number % CHUNKS] = 0xEE
        self.tier.submit_load(self.job(numbers, is_promotion=True))
        return self.finish(), [self.memory[number % CHUNKS].tobytes() for number in numbers]

    def lookup(self, *numbers: int) -> list[bool]:
        """Ask until the store has answered."""
        self._requests += 1
        request = ReqContext(req_id=f"request-{self._requests}")
        until = time.monotonic() + 30
        while True:
            answers = [self.tier.lookup(key_of(number), request) for number in numbers]
            if LookupResult.RETRY not in answers:
                break
            assert time.monotonic() < until
            self.step()
        self.tier.on_request_finished(request)
        return [answer is LookupResult.HIT for answer in answers]

    def step(self) -> None:
        self.tier.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.005)

    def finish(self) -> JobResult:
        return finished_job(self.tier)

    def job(self, numbers: Sequence[int], *, is_promotion: bool) -> TransferJob:
        self._jobs += 1
        return job_of(self._jobs, numbers, ReqContext(req_id="job"), is_promotion=is_promotion)

    def counts(self) -> dict[str, float]:
        stats = self.tier.get_stats()
        assert stats is not None
        return {name.removeprefix("vllm:npu_kv_remote_"): sum(of.values()) for name, of in stats._values.items()}


def s3_options(server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, value in {"ACCESS_KEY_ID": "AKIATEST", "SECRET_ACCESS_KEY": "canary-s3-secret"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    place = {"endpoint": server.endpoint, "region": "us-east-1"}
    return {"url": f"s3://blocks/{prefix}", "refresh": 0.1, "store_options": place}
