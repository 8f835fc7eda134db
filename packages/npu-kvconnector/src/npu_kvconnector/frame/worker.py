"""RecoveringWorker: the connector's half in a worker, in which a failed load is told and not the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

from npu_kvconnector.frame.metadata import JobsMetadata, StepMetadata
from npu_kvconnector.worker import HostTierWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec, TransferResult

__all__ = ["RecoveringWorker"]


class RecoveringWorker(OffloadingConnectorWorker):
    """vLLM's, which ends the engine where a job fails, with failures handed to the scheduler instead."""

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Start without jobs."""
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta = JobsMetadata()
        # With several groups a block's number is not unique, and vLLM wants the requests instead.
        self._reports_blocks = len(kv_cache_config.kv_cache_groups) == 1
        self._blocks_of_load: dict[int, set[int]] = {}
        self._bad_blocks: set[int] = set()

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's loads and the stores of the last one."""
        if isinstance(self.worker, HostTierWorker):
            self.worker.begin_step(is_idle=isinstance(metadata, StepMetadata) and metadata.is_idle)
        for job_id, job in metadata.load_jobs.items():
            self._blocks_of_load[job_id] = set(job.dst_spec.block_ids.tolist())
        super().start_kv_transfers(metadata)

    def take_results(self) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and those of them that must be computed as a whole."""
        results = KVConnectorTransferResults(finished_sending=set(), finished_recving=set())
        assert self.worker is not None
        for ended in self.worker.get_finished():
            request = self._end(ended)
            if request is not None:
                results.finished_recving.add(request)
                if not ended.success and not self._reports_blocks:
                    results.failed_recving.add(request)
        return results

    def take_bad_blocks(self) -> set[int]:
        """Return the device blocks that were to be loaded and were not, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> JobsMetadata | None:
        """Return what has ended since the last call."""
        meta = self._connector_worker_meta
        if not meta.completed_jobs:
            return None
        self._connector_worker_meta = JobsMetadata()
        return meta

    def _end(self, ended: TransferResult) -> str | None:
        """Take note of a job's end; return the request that waits for it."""
        meta = self._connector_worker_meta
        request = self._load_jobs.pop(ended.job_id, None)
        blocks = self._blocks_of_load.pop(ended.job_id, set())
        meta.mark_completed(ended.job_id)
        if ended.success:
            stats = meta.transfer_stats.store if request is None else meta.transfer_stats.load
            stats.record(ended.transfer_size, ended.transfer_time)
        else:
            meta.failed_jobs.add(ended.job_id)
            if self._reports_blocks:
                self._bad_blocks |= blocks
        return request
