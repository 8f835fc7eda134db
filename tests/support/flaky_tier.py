"""FlakyTier: a secondary tier in memory that fails as it is told to, for engines that must not mind.

``{"type": "FlakyTier", "module_path": "tests.support.flaky_tier", "bad_load": 2, "bad_lookup": 5}``: every second load
writes rubbish and fails, every fifth lookup raises; ``late_load`` and ``silent_lookup`` are every so many that are
never answered; ``late_store`` the same of stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob


class FlakyTier(SecondaryTierManager):
    """Holds what it is given for as long as the engine lives."""

    medium = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, options.pop("backpressure_detector"))
        self._rows, self._size = primary_kv_view.cast("B"), self.block_size_bytes
        self.every = options
        self.counts: dict[str, int] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.ended: list[JobResult] = []

    def is_turn(self, name: str) -> bool:
        """Return whether this call is one of those that go wrong."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return name in self.every and self.counts[name] % self.every[name] == 0

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if self.is_turn("bad_lookup"):
            msg = "the index is broken"
            raise OSError(msg)
        if self.is_turn("silent_lookup"):
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            self.chunks[key] = bytes(self._rows[chunk * self._size : (chunk + 1) * self._size])
        if not self.is_turn("late_store"):
            self.ended.append(JobResult(job_metadata.job_id, success=True, transfer_time=0.001))

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self.is_turn("late_load"):
            return
        bad = self.is_turn("bad_load")
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            place = slice(chunk * self._size, (chunk + 1) * self._size)
            self._rows[place] = bytes(self._size) if bad else self.chunks[key]
        self.ended.append(JobResult(job_metadata.job_id, success=not bad, transfer_time=0.001))

    def get_finished_jobs(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        return

    def shutdown(self) -> None:
        self._rows.release()  # or the host tier could not give its memory back
