"""What the scheduler tells workers before a step and they tell it after one: vLLM's, and what vLLM leaves out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

__all__ = ["JobsMetadata", "StepMetadata"]


@dataclasses.dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """The transfers of a step."""

    is_idle: bool = False
    """Whether no tokens are computed in it, so that no request waits for what is copied but those it is copied for."""


@dataclasses.dataclass
class JobsMetadata(OffloadingWorkerMetadata):
    """Jobs that have ended; those that failed on this worker, or on any, are among them."""

    failed_jobs: set[int] = dataclasses.field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> JobsMetadata:
        """Return both workers' reports as one."""
        merged = super().aggregate(other)
        failed = self.failed_jobs | cast("JobsMetadata", other).failed_jobs
        return JobsMetadata(merged.completed_jobs, merged.transfer_stats, failed)
