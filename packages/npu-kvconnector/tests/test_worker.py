"""HostTierWorker under vLLM's own job specs: several KV cache groups, chunks of several blocks, memory limits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="the worker is a part of vLLM's offloading frame; install npu-kvconnector[vllm]")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from npu_kvconnector.errors import CapacityError, TransferError
from npu_kvconnector.worker import HostTierWorker

BLOCKS, PAGES = 16, (64, 96)


@pytest.fixture
def caches() -> CanonicalKVCaches:
    """Two tensors; group 0 lives in both (one layer without padding), group 1 in the first alone."""
    tensors = [torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8) for page in PAGES]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, PAGES, strict=True)],
        group_data_refs=[
            [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1] - 8)],
            [CanonicalKVCacheRef(0, PAGES[0])],
        ],
    )


def worker_of(caches: CanonicalKVCaches, blocks_per_chunk: int = 2) -> HostTierWorker:
    budget = 8 * blocks_per_chunk * sum(PAGES)
    return HostTierWorker(caches, num_chunks=8, blocks_per_chunk=blocks_per_chunk, budget=budget)


def test_groups_come_back_to_other_blocks(caches: CanonicalKVCaches) -> None:
    worker = worker_of(caches)
    both, first = (cache.tensor.clone() for cache in caches.tensors[::-1])
    # Group 0: three blocks from the middle of a chunk; group 1: two blocks, one chunk.
    stored = GPULoadStoreSpec([1, 2, 3, 8, 9], group_sizes=[3, 2], block_indices=[1, 4])
    assert worker.submit_store(5, stored, CPULoadStoreSpec([4, 6, 0]))
    worker.wait({5})
    (done,) = worker.get_finished()
    assert (done.job_id, done.success, done.transfer_size) == (5, True, 3 * sum(PAGES) + 2 * PAGES[0])
    for cache in caches.tensors:
        cache.tensor.zero_()
    loaded = GPULoadStoreSpec([11, 5, 7, 0, 15], group_sizes=[3, 2], block_indices=[1, 4])
    assert worker.submit_load(6, CPULoadStoreSpec([4, 6, 0]), loaded)
    assert [job.job_id for job in worker.get_finished()] == [6]
    assert torch.equal(caches.tensors[0].tensor[[11, 5, 7, 0, 15]], first[[1, 2, 3, 8, 9]])
    assert torch.equal(caches.tensors[1].tensor[[11, 5, 7]], both[[1, 2, 3]])
    assert not caches.tensors[1].tensor[[0, 15]].any()


def test_a_job_outside_of_the_caches_copies_nothing(caches: CanonicalKVCaches) -> None:
    worker = worker_of(caches, blocks_per_chunk=1)
    spec = GPULoadStoreSpec([0, BLOCKS], group_sizes=[2, 0], block_indices=[0, 0])
    with pytest.raises(TransferError, match="outside"):
        worker.submit_store(1, spec, CPULoadStoreSpec([0, 1]))
    assert worker.get_finished() == []


def test_memory_is_bounded(caches: CanonicalKVCaches) -> None:
    with pytest.raises(CapacityError, match="share"):
        HostTierWorker(caches, num_chunks=8, blocks_per_chunk=2, budget=16 * sum(PAGES) - 1)


def test_shutdown_gives_the_memory_back_and_ends_service(caches: CanonicalKVCaches) -> None:
    worker = worker_of(caches)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(TransferError, match="after shutdown"):
        worker.submit_store(1, GPULoadStoreSpec([0], [1, 0], [0, 0]), CPULoadStoreSpec([0]))
