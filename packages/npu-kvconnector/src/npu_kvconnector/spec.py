"""NPUHostTierSpec: what vLLM's offloading frame asks for, a manager (vLLM's own) and a worker (ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from npu_kvconnector.errors import CapacityError, UnsupportedError
from npu_kvconnector.worker import HostTierWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["NPUHostTierSpec"]


class NPUHostTierSpec(CPUOffloadingSpec):
    """vLLM's host tier (sizes, index, eviction, metrics), freed of its tie to CUDA and XPU."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Size the tier.

        Raises:
            CapacityError: ``cpu_bytes_to_use`` is less than one chunk.
        """
        super().__init__(config)
        self._has_worker = False
        if self.num_chunks < 1:
            msg = (
                f"cpu_bytes_to_use={config.extra_config['cpu_bytes_to_use']} holds no chunk: "
                f"one takes {self.kv_bytes_per_chunk} bytes; raise it, or lower blocks_per_chunk"
            )
            raise CapacityError(msg)

    def _uses_shared_region(self) -> bool:
        """Return False: each worker owns its share of the host memory."""
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker over the registered caches, with its host memory allocated.

        Raises:
            UnsupportedError: caches are registered a second time; what the tier holds would no longer be known.
            CapacityError: the host has less memory available.
        """
        if self._has_worker:
            msg = "the KV caches of this worker were registered twice; restart the engine to change them"
            raise UnsupportedError(msg)
        self._has_worker = True
        budget = int(self.extra_config["cpu_bytes_to_use"]) // self.config.parallel.world_size
        return HostTierWorker(
            kv_caches, num_chunks=self.num_chunks, blocks_per_chunk=self.blocks_per_chunk, budget=budget
        )
