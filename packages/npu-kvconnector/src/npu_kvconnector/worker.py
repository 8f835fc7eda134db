"""HostTierWorker: carries out vLLM's store and load jobs between a device's KV caches and the host tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from vllm.logger import init_logger
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from npu_kvconnector.errors import TransferError
from npu_kvconnector.tiers.host import allocate_pages
from npu_kvconnector.transfer import Lane, copy_runs, plan_runs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

__all__ = ["HostTierWorker"]

logger = init_logger("vllm.npu_kvconnector")


class HostTierWorker(OffloadingWorker):
    """Moves pages by plain torch copies, so it serves any device; streams and events where the device has them."""

    def __init__(self, kv_caches: CanonicalKVCaches, *, num_chunks: int, blocks_per_chunk: int, budget: int) -> None:
        """Allocate the host tier beside the caches.

        Args:
            kv_caches: vLLM's view of the device's caches: tensors [blocks, page_size] of bytes, and for each KV cache
                group the tensors it lives in.
            num_chunks: chunks the host tier holds.
            blocks_per_chunk: KV blocks in a chunk.
            budget: bytes of host memory this worker may take.

        Raises:
            CapacityError: the host tier does not fit.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._device_pages = [cache.tensor for cache in kv_caches.tensors]
        device = self._device_pages[0].device
        self._host_pages = allocate_pages(
            [cache.page_size_bytes for cache in kv_caches.tensors],
            num_pages=num_chunks * blocks_per_chunk,
            budget=budget,
            pin_memory=device.type != "cpu" and is_pin_memory_available(),
        )
        self._tensors_of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._stores, self._loads = Lane(device), Lane(device)
        self._is_pinned = self._host_pages[0].is_pinned()
        logger.info(
            "Host tier for %s: %d chunks of %d blocks, %.2f GiB of %s memory",
            device,
            num_chunks,
            blocks_per_chunk,
            sum(pages.nbytes for pages in self._host_pages) / 2**30,
            "pinned" if self._is_pinned else "pageable",
        )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start copying device blocks to host chunks."""
        return self._submit(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start copying host chunks to device blocks."""
        return self._submit(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs done since the last call."""
        return [
            TransferResult(job.job_id, success=True, transfer_size=job.num_bytes, transfer_time=job.seconds)
            for lane in (self._stores, self._loads)
            for job in lane.take_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs are done."""
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """Let copies in flight end, then give the memory back to the system; safe to call twice."""
        self._stores.wait()
        self._loads.wait()
        self._device_pages.clear()
        self._host_pages.clear()
        if self._is_pinned:
            self._is_pinned = False
            torch.accelerator.empty_host_cache()  # where PyTorch keeps pinned memory that was freed

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, to_host: bool) -> bool:
        if not self._host_pages:
            msg = f"job {job_id} was submitted after shutdown"
            raise TransferError(msg)
        chunk_ids = cast("CPULoadStoreSpec", chunks).chunk_ids  # what vLLM's manager of a host tier makes
        plan = plan_runs(blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunk_ids, self._blocks_per_chunk)

        def copy() -> int:
            return sum(
                copy_runs(self._device_pages[tensor], self._host_pages[tensor], runs, to_host=to_host)
                for runs, tensors in zip(plan, self._tensors_of_group, strict=True)
                for tensor in tensors
            )

        (self._stores if to_host else self._loads).submit(job_id, copy)
        return True
