"""HostTierWorker under vLLM's own job specs: several KV cache groups, chunks of several blocks, canonical pages, faults."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="the worker is a part of vLLM's offloading frame; install npu-kvconnector[vllm]")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from npu_kvconnector import worker as module
from npu_kvconnector.tiers.host import HostRegion
from npu_kvconnector.worker import HostTierWorker

BLOCKS, PAGES, CHUNKS = 16, (64, 96), 8

Make = Callable[..., HostTierWorker]


def caches_of(pages: tuple[int, ...] = PAGES, device: str = "cpu") -> CanonicalKVCaches:
    """Two tensors; group 0 lives in both (one layer without padding), group 1 in the first alone."""
    tensors = [torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8, device=device) for page in pages]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)],
        group_data_refs=[
            [CanonicalKVCacheRef(0, pages[0]), CanonicalKVCacheRef(1, pages[1] - 8)],
            [CanonicalKVCacheRef(0, pages[0])],
        ],
    )


@pytest.fixture
def make() -> Iterator[Make]:
    """Make workers of one engine, and end them with the test."""
    engine, made = f"test-{uuid.uuid4()}", []

    def worker(
        caches: CanonicalKVCaches, rank: int = 0, workers: int = 1, blocks_per_chunk: int = 2, **options: bool
    ) -> HostTierWorker:
        share = 4096 // workers
        region = HostRegion(engine, num_chunks=CHUNKS, rank=rank, kv_bytes_per_chunk=4096, cpu_page_size=share)
        made.append(HostTierWorker(caches, region, blocks_per_chunk=blocks_per_chunk, **options))
        return made[-1]

    yield worker
    for one in made:
        one.shutdown()


def ended(worker: HostTierWorker) -> list[tuple[int, bool, int]]:
    return [(job.job_id, job.success, job.transfer_size) for job in worker.get_finished()]


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


NPU = pytest.mark.skipif(not hasattr(torch, "npu"), reason="no npu device here")


@pytest.fixture(params=["cpu", "strided", pytest.param("npu", marks=NPU), pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where the caches lie; a job is one launch there, but with strided copies of torch's."""
    if request.param != "strided":
        return str(request.param)
    monkeypatch.setattr(module, "find_batch_copy", lambda *_: None)
    return "cpu"


def test_groups_come_back_to_other_blocks(make: Make, device: str) -> None:
    caches = caches_of(device=device)
    worker = make(caches)
    both, first = (cache.tensor.clone() for cache in caches.tensors[::-1])
    # Group 0: three blocks from the middle of a chunk; group 1: two blocks, one chunk.
    stored = GPULoadStoreSpec([1, 2, 3, 8, 9], group_sizes=[3, 2], block_indices=[1, 4])
    assert worker.submit_store(5, stored, CPULoadStoreSpec([4, 6, 0]))
    worker.wait({5})
    assert ended(worker) == [(5, True, 3 * (sum(PAGES) - 8) + 2 * PAGES[0])]
    for cache in caches.tensors:
        cache.tensor.zero_()
    loaded = GPULoadStoreSpec([11, 5, 7, 0, 15], group_sizes=[3, 2], block_indices=[1, 4])
    assert worker.submit_load(6, CPULoadStoreSpec([4, 6, 0]), loaded)
    worker.wait({6})
    assert [job[:2] for job in ended(worker)] == [(6, True)]
    assert torch.equal(caches.tensors[0].tensor[[11, 5, 7, 0, 15]], first[[1, 2, 3, 8, 9]])
    assert torch.equal(caches.tensors[1].tensor[[11, 5, 7], :-8], both[[1, 2, 3], :-8])
    assert not caches.tensors[1].tensor[[0, 15]].any()


def test_workers_keep_to_their_places(make: Make, device: str) -> None:
    caches = [caches_of(device=device), caches_of(device=device)]
    workers = [make(one, rank, workers=2) for rank, one in enumerate(caches)]
    before = [one.tensors[0].tensor.clone() for one in caches]
    blocks, chunks = GPULoadStoreSpec([3], [0, 1], [0, 0]), CPULoadStoreSpec([2])
    for worker in workers:
        worker.submit_store(1, blocks, chunks)
        worker.wait({1})
    for worker, cache, tensor in zip(workers, caches, before, strict=True):
        worker.submit_load(2, chunks, GPULoadStoreSpec([9], [0, 1], [0, 0]))
        worker.wait({2})
        assert torch.equal(cache.tensors[0].tensor[9], tensor[3])


def canonical(rank: int, tensor: torch.Tensor, *, ranks: int = 2) -> CanonicalKVCaches:
    """A layer whose 4 tokens of 8 bytes alternate between ranks in the canonical page; one rank holds all of them."""
    page = tensor.shape[1]
    runs = (CopyRun(0, rank * 8, 8, page // 8, 8, 8 * ranks),)
    mapping = CanonicalPageMapping(page * ranks, page, runs, 1, 0, parallelism_agnostic=True)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page, mapping)]])


def test_canonical_pages_of_two_workers_are_those_of_one(make: Make, device: str) -> None:
    one = torch.zeros(BLOCKS, 64, dtype=torch.int8, device=device)
    two = [torch.randint(-128, 128, (BLOCKS, 32), dtype=torch.int8, device=device) for _ in range(2)]
    for rank, tensor in enumerate(two):
        worker = make(canonical(rank, tensor), rank, workers=2, canonical=True)
        worker.submit_store(1, GPULoadStoreSpec([4, 5, 6], [3], [1]), CPULoadStoreSpec([3, 7]))
        worker.wait({1})
        assert ended(worker) == [(1, True, 96)]
    whole = make(canonical(0, one, ranks=1), canonical=True)
    whole.submit_load(2, CPULoadStoreSpec([3, 7]), GPULoadStoreSpec([0, 1, 2], [3], [1]))
    whole.wait({2})
    assert torch.equal(one[:3].view(3, 4, 2, 8), torch.stack([t[4:7].view(3, 4, 8) for t in two], dim=2))


def test_workers_with_the_same_bytes_take_turns_to_write_them(make: Make, device: str) -> None:
    written = []
    for rank in range(2):
        tensor = torch.full((BLOCKS, 32), rank + 1, dtype=torch.int8, device=device)
        mapping = CanonicalPageMapping(32, 32, (CopyRun(0, 0, 32, 1, 32, 32),), 2, rank, parallelism_agnostic=True)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 32)], [[CanonicalKVCacheRef(0, 32, mapping)]])
        worker = make(caches, rank, workers=2, blocks_per_chunk=1, canonical=True)
        worker.submit_store(1, GPULoadStoreSpec([4, 5, 6], [3], [0]), CPULoadStoreSpec([1, 2, 3]))
        worker.wait({1})
        written += ended(worker)
    assert written == [(1, True, 32), (1, True, 64)]  # places 2, and 1 and 3
    worker.submit_load(2, CPULoadStoreSpec([1, 2, 3]), GPULoadStoreSpec([0, 1, 2], [3], [0]))
    worker.wait({2})
    assert tensor[:3, 0].tolist() == [2, 1, 2]


@pytest.mark.parametrize(("block", "chunk"), [(BLOCKS, 0), (-1, 0), (0, CHUNKS), (0, -1)])
def test_a_job_outside_of_the_caches_fails_and_copies_nothing(make: Make, device: str, block: int, chunk: int) -> None:
    caches = caches_of(device=device)
    worker = make(caches, blocks_per_chunk=1)
    before = caches.tensors[0].tensor.clone()
    worker.submit_load(1, CPULoadStoreSpec([1, chunk]), GPULoadStoreSpec([0, block], [2, 0], [0, 0]))
    worker.wait({1})
    assert ended(worker) == [(1, False, 0)]
    assert torch.equal(caches.tensors[0].tensor, before)


def test_stores_that_pile_up_fail(make: Make, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PENDING_STORES", 3 * PAGES[0])
    worker = make(caches_of(device=device), blocks_per_chunk=1)
    blocks, chunks = GPULoadStoreSpec([0, 1], [0, 2], [0, 0]), CPULoadStoreSpec([1, 2])
    for job in range(3):
        worker.submit_store(job, blocks, chunks)
    worker.wait({0, 1, 2})
    assert [job[:2] for job in ended(worker)] == [(0, True), (1, True), (2, False)]
    worker.submit_store(3, blocks, chunks)
    worker.wait({3})
    assert [job[:2] for job in ended(worker)] == [(3, True)]


def test_after_shutdown_jobs_fail(make: Make, device: str) -> None:
    worker = make(caches_of(device=device))
    worker.shutdown()
    worker.shutdown()
    worker.submit_store(1, GPULoadStoreSpec([0], [1, 0], [0, 0]), CPULoadStoreSpec([0]))
    worker.wait({1})
    assert ended(worker) == [(1, False, 0)]


@NPU
def test_scattered_blocks_of_a_job_are_one_launch(make: Make) -> None:
    caches = caches_of(device="npu")
    worker = make(caches, blocks_per_chunk=1)
    first = caches.tensors[0].tensor
    before = first.cpu()
    blocks, chunks = GPULoadStoreSpec([9, 2, 5, 0, 7, 3], [3, 3], [0, 0]), CPULoadStoreSpec([7, 1, 4, 0, 6, 2])
    for submit, specs in ((worker.submit_store, (blocks, chunks)), (worker.submit_load, (chunks, blocks))):
        kernels, fallbacks = torch.npu.launch_counts()
        submit(1, *specs)
        assert torch.npu.launch_counts() == (kernels + 1, fallbacks)
        worker.wait({1})
        assert [job[:2] for job in ended(worker)] == [(1, True)]
        if submit == worker.submit_store:
            first[[0, 7, 3]] = 0
    assert torch.equal(first.cpu(), before)


@NPU
def test_a_load_that_a_step_has_no_time_for_is_a_launch_a_step() -> None:
    pages, blocks = 1 << 20, 64
    tensor = torch.randint(-128, 128, (blocks, pages), dtype=torch.int8, device="npu")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, pages)], [[CanonicalKVCacheRef(0, pages)]])
    region = HostRegion(
        f"test-{uuid.uuid4()}", num_chunks=blocks, rank=0, kv_bytes_per_chunk=pages, cpu_page_size=pages
    )
    worker = HostTierWorker(caches, region, blocks_per_chunk=1)
    before, order = tensor.cpu(), torch.randperm(blocks).tolist()
    on_device, on_host = GPULoadStoreSpec(order, [blocks], [0]), CPULoadStoreSpec(list(range(blocks)))
    worker.submit_store(1, on_device, on_host)
    assert ended(worker) == [(1, True, blocks * pages)]
    tensor.zero_()
    worker.begin_step(is_idle=False)  # the first: two milliseconds
    worker.submit_load(2, on_host, on_device)
    results, steps = [], 0
    while not results:
        worker.begin_step(is_idle=False)
        kernels = torch.npu.launch_counts()[0]
        results = ended(worker)
        assert torch.npu.launch_counts()[0] - kernels <= 1
        steps += 1
    assert results == [(2, True, blocks * pages)]
    assert steps > 2
    assert torch.equal(tensor.cpu(), before)
    worker.shutdown()


@CUDA
def test_the_host_does_not_wait_for_a_step_whose_blocks_it_stores(make: Make) -> None:
    caches = caches_of(device="cuda")
    worker = make(caches, blocks_per_chunk=1)
    blocks, chunks = GPULoadStoreSpec([0, 5], [2, 0], [0, 0]), CPULoadStoreSpec([1, 2])
    for cache in caches.tensors:
        cache.tensor.fill_(1)
    torch.cuda._sleep(1)
    worker.submit_store(1, blocks, chunks)  # what is loaded at the first calls is
    worker.wait({1})
    assert len(ended(worker)) == 1
    torch.cuda._sleep(10_000_000_000)  # some seconds: other tests keep the host busy
    for cache in caches.tensors:
        cache.tensor.fill_(7)
    worker.submit_store(2, blocks, chunks)
    assert ended(worker) == []
    worker.wait({2})
    assert [job[:2] for job in ended(worker)] == [(2, True)]
    caches.tensors[0].tensor.zero_()
    worker.submit_load(3, chunks, blocks)
    worker.wait({3})
    assert caches.tensors[0].tensor[[0, 5]].eq(7).all()
