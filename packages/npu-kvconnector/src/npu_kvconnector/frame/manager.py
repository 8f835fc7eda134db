"""TierManager: vLLM's manager of the host tier and those behind it, in which what fails is computed again.

Runs in the scheduler. The host tier's chunks are indexed by vLLM's own manager; here it learns to drop a chunk.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from npu_kvconnector import metrics
from npu_kvconnector.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext

    from npu_kvconnector.tiers.guard import GuardedTier
    from npu_kvconnector.tiers.host import HostRegion

__all__ = ["HostTier", "TierManager"]

logger = init_logger("vllm.npu_kvconnector")


class HostTier(CPUPrimaryTierOffloadingManager):
    """vLLM's index of the host tier; a chunk may be dropped, and `store_threshold` holds with tiers behind it too."""

    def __init__(
        self,
        region: HostRegion,
        *,
        eviction_policy: str,
        cache_policy_module_path: str | None,
        enable_events: bool,
        store_threshold: int,
        max_tracker_size: int,
    ) -> None:
        """Index the chunks of ``region``; the rest is as vLLM's ``CPUOffloadingManager`` has it."""
        super().__init__(region.num_chunks, region, eviction_policy, cache_policy_module_path, enable_events)
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: collections.OrderedDict[OffloadKey, int] | None = None
        if store_threshold >= 2:
            self.counts = collections.OrderedDict()
        self.prepare_write = self._prepare_promotion
        self.arrivals = 0
        """How often chunks came in, or were found not to."""

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make chunks loadable, or forget them."""
        self.arrivals += 1
        super().complete_store(keys, req_context, success)

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """Forget chunks that nobody reads or writes."""
        dropped = []
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.remove(key)
                self._num_evictable_cache_chunks -= 1
                self._free_chunk(chunk)
                dropped.append(key)
        if dropped and self.events is not None:
            self.events.append(OffloadingEvent(keys=dropped, medium=self.medium, removed=True))

    def withhold(self, chunks: set[int]) -> None:
        """Never use these chunks again, of a tier that was just reset."""
        self._num_allocated_chunks = self._num_chunks
        self._free_list = [chunk for chunk in range(self._num_chunks) if chunk not in chunks]

    def _prepare_promotion(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Make room for chunks from a tier behind; they are no offers, which `store_threshold` would count."""
        counts, self.counts = self.counts, None
        try:
            return self.prepare_store(keys, req_context)
        finally:
            self.counts = counts


class TierManager(TieringOffloadingManager):
    """vLLM's manager over guarded tiers. Chunks whose transfer failed are dropped, and their requests go without."""

    def __init__(self, host: HostTier, tiers: list[GuardedTier], *, blocks_per_chunk: int) -> None:
        """Manage the host tier and those behind it, nearest first."""
        super().__init__(host, tiers)
        self._host = host
        self._tiers = tiers
        self._blocks_per_chunk = blocks_per_chunk
        self._failed_stores: set[OffloadKey] = set()
        self._failed_loads: set[OffloadKey] = set()
        self._without_tiers: set[str] = (
            set()
        )  # requests whose load has failed: a second one might fail as well, for ever
        self._own_stats = OffloadingConnectorStats()
        self.is_held = False
        """Whether chunks must not be filled from the tiers behind yet: the scheduler says so after a reset."""
        self.has_to_ask = False
        """Whether a tier was asked that has not answered yet; for who sets it to False before."""

    @property
    def arrivals(self) -> int:
        """How often chunks of the host tier came in, or were found not to."""
        return self._host.arrivals

    def note_failure(self, keys: Collection[OffloadKey], request: str, *, is_store: bool) -> None:
        """Take note of a job between device and host that failed on some worker; its end is told later."""
        if is_store:
            self._failed_stores.update(keys)
        elif request not in self._without_tiers:
            self._failed_loads.update(keys)
            self._without_tiers.add(request)
            blocks = len(keys) * self._blocks_per_chunk
            self._own_stats.increase_counter(metrics.RECOMPUTED_BLOCKS, blocks, (metrics.HOST_LABEL,))

    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """Return where a chunk is; MISS for a request whose load has failed, and for a load that takes too long."""
        if req_context.req_id in self._without_tiers:
            return LookupResult.MISS
        if self.is_held:
            self.has_to_ask = True
            return LookupResult.RETRY
        result = super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)
        self.has_to_ask |= result is LookupResult.RETRY
        if result is LookupResult.HIT_PENDING and any(tier.is_overdue(key) for tier in self._tiers):
            return LookupResult.MISS
        return result

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make chunks loadable and hand them on to the tiers behind; forget them if their store failed."""
        success = success and self._failed_stores.isdisjoint(keys)
        self._failed_stores.difference_update(keys)
        super().complete_store(keys, req_context, success)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let chunks be evicted again; drop those whose load failed."""
        super().complete_load(keys, req_context)
        self._host.drop(self._failed_loads.intersection(keys))
        self._failed_loads.difference_update(keys)

    def on_request_finished(self, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> None:
        """Forget a request."""
        self._without_tiers.discard(req_context.req_id)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def transfer_params(self, req_context: ReqContext) -> dict[str, Any] | None:
        """Return what the answer to a request says of where its blocks may be fetched, if a tier holds them."""
        for tier in self._tiers:
            params = tier.transfer_params(req_context)
            if params is not None:
                return params
        return None

    def shutdown(self) -> None:
        """Shut all tiers down. One that does not answer keeps the host tier's memory, which goes with the process."""
        try:
            super().shutdown()
        except StoreError as error:  # logged there
            logger.warning("The host tier's memory stays until the process ends: %s", error)

    def reset_cache(self) -> None:
        """Forget all chunks of the host tier; those that a tier does not give back are not used again."""
        self._failed_stores.clear()
        self._failed_loads.clear()
        for tier in self._tiers:
            tier.drain_jobs()
        self._process_finished_jobs()
        lost = self._abandon_jobs()
        super().reset_cache()
        if self._tiers:
            logger.warning_once(
                "The host tier was emptied; the tiers behind it keep what they hold, which the weights of the start "
                "computed: after new weights (reload_weights) start a server without them, or anew"
            )
        if lost:
            logger.warning("%d chunks of the host tier stay with tiers that do not end their jobs", len(lost))
            self._host.withhold(lost)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the figures since the last call."""
        own, self._own_stats = self._own_stats, OffloadingConnectorStats()
        stats = super().get_stats()
        if stats is None or own.is_empty():
            return stats if own.is_empty() else own
        stats.aggregate(own)
        return stats

    def _abandon_jobs(self) -> set[int]:
        """Forget jobs that have no end after all was drained; return their chunks, which may still be written to."""
        chunks: set[int] = set()
        for job_id, job in self._jobs.items():
            self._tiers[job.tier_idx].abandon(job_id)
            self._metrics.on_job_finished(job, JobResult(job_id, success=False))
            chunks.update(job.transfer_job.chunk_ids.tolist())
        self._jobs.clear()
        return chunks

    def _should_store_to_tier(self, tier: GuardedTier, num_blocks: int) -> bool:
        return tier.accepts(num_blocks) and super()._should_store_to_tier(tier, num_blocks)
