"""RecoveringScheduler: the connector's half in the scheduler, which tells the manager of the tiers what has failed.

Note [A reset while chunks are read]. A load takes several steps, and a reset forgets the chunks that it reads. They
must not be filled from a tier behind before the workers have read them to the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from npu_kvconnector.frame.metadata import JobsMetadata

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["RecoveringScheduler"]


class RecoveringScheduler(OffloadingConnectorScheduler):
    """vLLM's; it completes failed jobs too, so the manager hears first which these are."""

    def __init__(self, *arguments: Any) -> None:
        """Start without jobs; the arguments are vLLM's."""
        super().__init__(*arguments)
        self._reading: dict[int, int] = {}  # loads of before a reset -> workers that are not through

    def reset_cache(self) -> None:
        """Forget what the host tier holds; see Note [A reset while chunks are read]."""
        self._reading |= {number: job.pending_count for number, job in self._jobs.items() if not job.is_store}
        super().reset_cache()
        self.manager.is_held = bool(self._reading)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what has ended on the workers."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, JobsMetadata):
            for job_id in meta.failed_jobs:
                job = self._jobs.get(job_id)  # none: the cache was reset since
                if job is not None:
                    self.manager.note_failure(job.keys, job.req_id, is_store=job.is_store)
            for job_id in self._reading.keys() & meta.completed_jobs.keys():
                self._reading[job_id] -= meta.completed_jobs[job_id]
            self._reading = {job_id: left for job_id, left in self._reading.items() if left > 0}
            self.manager.is_held = bool(self._reading)
        super().update_connector_output(connector_output)
