"""SealedTier: what tiers that seal blocks have in common, a disk's and a store's: keys, results and counts.

A block is sealed in an envelope that says whose it is, so its name must be one that nobody can find two blocks for.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, RequestOffloadingContext, get_offload_block_hash
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["RefusedJob", "SealedTier"]

logger = init_logger("vllm.npu_kvconnector")

_HASH_BYTES = 32


class RefusedJob(JobResult):
    """Of a store that a tier which works did not take: no failure of the tier's, nor a sign that it stores."""


class SealedTier(SecondaryTierManager):
    """A tier whose threads do the work: the scheduler submits jobs and collects results, and never waits."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """Read the options and open what holds the blocks.

        Args:
            offloading_spec: vLLM's description of the deployment.
            primary_kv_view: bytes of the host tier [chunks, bytes of a chunk].
            tier_type: what the configuration calls this tier.
            backpressure_detector: vLLM's, if configured.
            options: the tier's other options.

        Raises:
            OptionError: an option is wrong, or something that it needs is missing.
            StoreError: what holds the blocks cannot be opened.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the counts, and what a tier says
        self._counts: dict[str, int] = {}
        self._has_short_keys = False
        self._events: collections.deque[OffloadingEvent] = collections.deque()
        self._start(offloading_spec, primary_kv_view, options)

    @abstractmethod
    def _start(self, spec: OffloadingSpec, memory: memoryview, options: Mapping[str, Any]) -> None:
        """Read the options and open what holds the blocks; the arguments are the constructor's."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs done since the last call."""
        finished = []
        with contextlib.suppress(queue.Empty):
            while True:
                finished.append(self._results.get_nowait())
        return finished

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored since the last call, as KV events; blocks that go by themselves are not told."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._events.popleft()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for new blocks only; those that were found are stored already."""
        return RequestOffloadingContext()

    def _is_unique(self, key: OffloadKey) -> bool:
        """Return whether a block's hash is SHA-256; for shorter ones somebody could make another prompt's match."""
        if len(get_offload_block_hash(key)) == _HASH_BYTES:
            return True
        if not self._has_short_keys:
            self._has_short_keys = True
            hint = "--prefix-caching-hash-algo sha256 or sha256_cbor"
            logger.error("The %s tier needs %s; it stays unused", self.tier_type, hint)
        return False

    def _note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Tell of stored blocks, for KV events; any thread may."""
        self._events.append(OffloadingEvent(list(keys), self.medium, removed=False, locality=self.locality))

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number

    def _take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts
