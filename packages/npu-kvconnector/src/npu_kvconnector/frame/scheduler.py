"""RecoveringScheduler: the connector's half in the scheduler, which tells the manager of the tiers what has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from npu_kvconnector.frame.metadata import JobsMetadata

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["RecoveringScheduler"]


class RecoveringScheduler(OffloadingConnectorScheduler):
    """vLLM's; it completes failed jobs too, so the manager hears first which these are."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what has ended on the workers."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, JobsMetadata):
            for job_id in meta.failed_jobs:
                job = self._jobs.get(job_id)  # none: the cache was reset since
                if job is not None:
                    self.manager.note_failure(job.keys, job.req_id, is_store=job.is_store)
        super().update_connector_output(connector_output)
