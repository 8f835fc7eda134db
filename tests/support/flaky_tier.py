"""FlakyTier: a secondary tier in memory that fails as it is told to, for engines that must not mind.

``{"type": "FlakyTier", "module_path": "tests.support.flaky_tier", "bad_load": 2, "bad_lookup": 5}``: every second load
writes rubbish and fails, every fifth lookup raises; ``bad_store`` are every so many stores that fail, ``late_load``,
``late_store`` and ``silent_lookup`` every so many that are never answered. ``slow`` and ``slow_lookup`` are seconds: that a
load or store takes, and that a chunk is not known yet. With ``switch``, the name of a file, all of this begins when the
file is there. With ``asks`` a chunk is not known when it is first asked for, as of a tier that asks elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path
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
        self.switch = Path(options["switch"]) if "switch" in options else None
        self.slow, self.slow_lookup = options.pop("slow", 0.0), options.pop("slow_lookup", 0.0)
        self.asks = options.pop("asks", False)
        self.every = options
        self.counts: dict[str, int] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.asked: dict[bytes, float] = {}
        self.ended: list[tuple[float, JobResult]] = []

    @property
    def misbehaves(self) -> bool:
        """Whether anything goes wrong yet."""
        return self.switch is None or self.switch.exists()

    def is_turn(self, name: str) -> bool:
        """Return whether this call is one of those that go wrong."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return name in self.every and self.counts[name] % self.every[name] == 0 and self.misbehaves

    def end(self, job_id: int, *, success: bool) -> None:
        """Tell of a job's end, when its time has come."""
        seconds = self.slow if self.misbehaves else 0.0
        result = JobResult(job_id, success=success, transfer_time=max(seconds, 0.001))
        self.ended.append((time.monotonic() + seconds, result))

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if self.is_turn("bad_lookup"):
            msg = "the index is broken"
            raise OSError(msg)
        if self.is_turn("silent_lookup"):
            return LookupResult.RETRY
        now = time.monotonic()
        if self.asks and key not in self.asked:
            self.asked[key] = now
            return LookupResult.RETRY
        if self.slow_lookup and self.misbehaves and now - self.asked.setdefault(key, now) < self.slow_lookup:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.chunks else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self.is_turn("late_store"):
            return
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            self.chunks[key] = bytes(self._rows[chunk * self._size : (chunk + 1) * self._size])
        self.end(job_metadata.job_id, success=not self.is_turn("bad_store"))

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self.is_turn("late_load"):
            return
        bad = self.is_turn("bad_load")
        for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            place = slice(chunk * self._size, (chunk + 1) * self._size)
            self._rows[place] = bytes(self._size) if bad else self.chunks[key]
        self.end(job_metadata.job_id, success=not bad)

    def get_finished_jobs(self) -> list[JobResult]:
        now, ended = time.monotonic(), self.ended
        self.ended = [(due, result) for due, result in ended if due > now]
        return [result for due, result in ended if due <= now]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        return

    def shutdown(self) -> None:
        self._rows.release()  # or the host tier could not give its memory back
