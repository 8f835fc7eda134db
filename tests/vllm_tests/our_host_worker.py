"""npu-kvconnector's worker with what vLLM's own tests of copies between device and host look at in vLLM's worker."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from npu_kvconnector.worker import HostTierWorker

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches

__all__ = ["OurHostWorker"]


class _Region:
    """A region, and the views of it that a worker has taken."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        self._region = region
        self.views: list[torch.Tensor] = []

    def create_next_worker_view(self, size: int) -> torch.Tensor:
        self.views.append(self._region.create_next_worker_view(size))
        return self.views[-1]

    def cleanup(self) -> None:
        self.views.clear()
        self._region.cleanup()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


@dataclasses.dataclass
class _Direction:
    """What a test looks at in one direction: both sides' tensors, the groups, and the transfers on their way."""

    src_tensors: list[torch.Tensor]
    dst_tensors: list[torch.Tensor]
    layer_refs_per_group: list[list[CanonicalKVCacheRef]]
    _transfers: Any


class OurHostWorker(HostTierWorker):
    """Made as vLLM's ``CPUOffloadingWorker`` is; without a region it makes one."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        mmap_region: SharedOffloadRegion | None = None,
    ) -> None:
        size = sum(cache.page_size_bytes for cache in kv_caches.tensors) * blocks_per_chunk
        size += -size % SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
        taken = _Region(
            mmap_region
            or SharedOffloadRegion(
                str(uuid.uuid4()), num_chunks=num_cpu_chunks, rank=0, kv_bytes_per_chunk=size, cpu_page_size=size
            )
        )
        super().__init__(kv_caches, taken, blocks_per_chunk=blocks_per_chunk)
        device = [cache.tensor for cache in kv_caches.tensors]
        groups = kv_caches.group_data_refs
        self._store_handler = _Direction(device, taken.views, groups, self._stores._transfers)
        self._load_handler = _Direction(taken.views, device, groups, self._loads._transfers)
