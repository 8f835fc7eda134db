"""HostTierWorker: carries out vLLM's store and load jobs between a device's KV caches and the host tier."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from npu_kvconnector.batches import find_batch_copy
from npu_kvconnector.errors import TransferError
from npu_kvconnector.pages import Axis, PageMap, Stack, stack_up
from npu_kvconnector.transfer import Lane, Pace, Pairs, join_runs, plan_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from npu_kvconnector.tiers.host import HostRegion

__all__ = ["HostTierWorker"]

logger = init_logger("vllm.npu_kvconnector")

MOST_PENDING_STORES = 1 << 30
"""Bytes on their way to the host; further stores fail, which is a later miss, instead of piling up on the device."""


class HostTierWorker(OffloadingWorker):
    """Moves pages by strided torch copies, so it serves any device; streams and events where the device has them.

    Where there is an operator for all pages of a job, as on CUDA, on npu and on the CPU beside npu-ops, a job is one
    launch, or one a step if a step has no time for all of it.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: HostRegion, *, blocks_per_chunk: int, canonical: bool = False
    ) -> None:
        """Lay the caches' pages out in the host tier.

        Args:
            kv_caches: vLLM's view of the device's caches: tensors [blocks, page_size] of bytes, and for each KV cache
                group the tensors it lives in.
            region: this worker's part of the host tier; it is the worker's from now on.
            blocks_per_chunk: KV blocks in a chunk.
            canonical: whether chunks are laid out as without parallelism; each reference then has a mapping.
        """
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._num_blocks = len(kv_caches.tensors[0].tensor)
        views = _views(kv_caches, region, blocks_per_chunk, canonical=canonical)
        tensors = [cache.tensor for cache in kv_caches.tensors]
        self._stacks = [
            stack_up(_maps_of(refs, tensors, views, blocks_per_chunk, canonical), region.base_tensor, blocks_per_chunk)
            for refs in kv_caches.group_data_refs
        ]
        device = tensors[0].device
        self._batch_copy = find_batch_copy(device, region)
        self._stores, self._loads, self._pace = Lane(device), Lane(device), Pace()
        logger.info(
            "Host tier for %s: %d chunks of %d blocks, %.2f GiB; one copy moves %s of %s layers",
            device,
            region.num_chunks,
            blocks_per_chunk,
            region.total_size_bytes / 2**30,
            "a run of blocks" if self._batch_copy is None else "all blocks of a job",
            [
                len(refs) // max(1, len(stacks))
                for refs, stacks in zip(kv_caches.group_data_refs, self._stacks, strict=True)
            ],
        )

    def begin_step(self, *, is_idle: bool) -> None:
        """Begin a step, which computes nothing where it is idle; how long loads may be copied in it follows."""
        self._loads.seconds = self._pace.begin_step(self._loads.take_spent(), is_idle=is_idle)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start copying device blocks to host chunks; what cannot be done is told by `get_finished`."""
        self._submit(job_id, src_spec, dst_spec, to_host=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Start copying host chunks to device blocks; what cannot be done is told by `get_finished`.

        `expedited` is of vLLM 0.33, for loads that a step waits for; such are refused with sync_load_budget_bytes.
        """
        self._submit(job_id, dst_spec, src_spec, to_host=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call, well or not."""
        results = []
        for lane in (self._stores, self._loads):
            for job in lane.take_finished():
                if job.error is not None:
                    logger.warning("KV transfer %d failed: %s", job.job_id, job.error)
                success = job.error is None
                results.append(TransferResult(job.job_id, success, job.num_bytes, job.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended."""
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """Let copies in flight end, then give the memory back to the system; safe to call twice."""
        self._stores.wait()
        self._loads.wait()
        self._stacks, self._batch_copy = [], None  # which hold the region's memory
        self._region.cleanup()

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, to_host: bool) -> None:
        def copy() -> Iterator[int]:
            if to_host and self._stores.pending_bytes > MOST_PENDING_STORES:
                msg = f"{self._stores.pending_bytes} bytes of stores are on their way already"
                raise TransferError(msg)
            plan = self._plan(blocks, cast("CPULoadStoreSpec", chunks))
            moves = [
                (stack, _written(pairs, stack) if to_host else pairs)
                for pairs, stacks in zip(plan, self._stacks, strict=True)
                for stack in stacks
            ]
            if self._batch_copy is not None:
                yield from self._batch_copy(moves, to_host=to_host, left=lane.left)
                return
            for stack, pairs in moves:
                yield from stack.pieces(join_runs(pairs, self._blocks_per_chunk), to_host=to_host)

        lane = self._stores if to_host else self._loads
        lane.submit(job_id, copy)

    def _plan(self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec) -> list[Pairs]:
        """Return what a job moves.

        Raises:
            TransferError: it does not fit the caches, or comes after shutdown; nothing was copied.
        """
        if not self._stacks:
            msg = "the worker was shut down"
            raise TransferError(msg)
        for ids, count, what in (
            (blocks.block_ids, self._num_blocks, "device blocks"),
            (chunks.chunk_ids, self._region.num_chunks, "host chunks"),
        ):
            if len(ids) and not 0 <= ids.min() <= ids.max() < count:
                msg = f"{ids.min()} to {ids.max()} lie outside of {count} {what}"
                raise TransferError(msg)
        return plan_pairs(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.chunk_ids, self._blocks_per_chunk
        )


def _views(
    kv_caches: CanonicalKVCaches, region: HostRegion, blocks_per_chunk: int, *, canonical: bool
) -> list[torch.Tensor]:
    """Return the place of each tensor in the host tier, [chunks, bytes of a chunk], as vLLM divides a row."""
    if not canonical:
        sizes = [cache.page_size_bytes * blocks_per_chunk for cache in kv_caches.tensors]
        return [region.create_next_worker_view(size) for size in sizes]
    pages = [0] * len(kv_caches.tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        assert ref.mapping is not None
        pages[ref.tensor_idx] = max(pages[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return [region.create_next_canonical_view(page * blocks_per_chunk) for page in pages]


def _maps_of(
    refs: list[CanonicalKVCacheRef],
    tensors: list[torch.Tensor],
    views: list[torch.Tensor],
    blocks_per_chunk: int,
    canonical: bool,
) -> list[tuple[torch.Tensor, PageMap]]:
    """Return where the pages of a group lie, the like parts of all layers one after another."""
    parts = []
    for index, ref in sorted({ref.tensor_idx: ref for ref in refs}.items()):  # a tensor that layers share once
        maps = _parts_of(ref, tensors[index], views[index], blocks_per_chunk, canonical)
        parts += [(number, tensors[index], page) for number, page in enumerate(maps)]
    return [(tensor, page) for _, tensor, page in sorted(parts, key=lambda part: part[0])]


def _parts_of(
    ref: CanonicalKVCacheRef, tensor: torch.Tensor, view: torch.Tensor, blocks_per_chunk: int, canonical: bool
) -> list[PageMap]:
    """Return where the pages of a layer lie: one map, or in the canonical layout one a run of equal fragments."""
    whole = PageMap(
        device=int(tensor.storage_offset()),
        host=int(view.storage_offset()),
        block=tensor.stride(0),
        row=view.stride(0),
        page=view.shape[1] // blocks_per_chunk,
        size=ref.page_size_bytes,
    )
    if not canonical:
        return [whole]
    mapping = ref.mapping
    assert mapping is not None
    writers = (mapping.num_writers, mapping.writer_index)
    return [
        dataclasses.replace(
            whole,
            device=whole.device + run.local_offset,
            host=whole.host + run.canonical_offset,
            size=run.fragment_size,
            fragments=Axis(run.num_fragments, run.local_stride, run.canonical_stride),
            writers=writers,
        )
        for run in mapping.runs
    ]


def _written(pairs: Pairs, stack: Stack) -> Pairs:
    """Return the pairs that this worker stores, where several hold the same bytes and take turns."""
    count, index = stack.writers
    if count == 1:
        return pairs
    is_mine = pairs.places % count == index
    return Pairs(pairs.blocks[is_mine], pairs.places[is_mine])
