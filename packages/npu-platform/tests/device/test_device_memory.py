"""The allocator counts exactly, runs out for real and recovers, and gives back what graphs and pools leave."""

from __future__ import annotations

import gc
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DEVICE = "npu"
MIB = 1 << 20


def counted(*sizes: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes that a new tensor is counted with, by the rule that caching_allocator.h states."""
    nbytes = math.prod(sizes) * dtype.itemsize
    step = 512
    if 4096 < nbytes <= 512 << 10:
        step = 2 ** ((nbytes - 1).bit_length() - 1) // 8
    return -(-nbytes // step) * step


ROWS, COLUMNS, WIDE = 300, 70, 130
HALF, LONG, BOOL, COMPLEX = torch.bfloat16, torch.int64, torch.bool, torch.complex64
Chain = list[tuple[str, Callable[[SimpleNamespace], object], list[int]]]
# Name of what the step makes (its old value goes first where it is an operand no more), the op, and the bytes that its
# results must be counted with: none for a view and for an op in place.
CHAIN: Chain = [
    ("x", lambda t: torch.randn(ROWS, COLUMNS, device=DEVICE), [counted(ROWS, COLUMNS)]),
    ("y", lambda t: t.x * 2, [counted(ROWS, COLUMNS)]),
    ("y", lambda t: t.y + 1, [counted(ROWS, COLUMNS)]),
    ("z", lambda t: t.y.softmax(-1), [counted(ROWS, COLUMNS)]),
    ("half", lambda t: t.z.to(HALF), [counted(ROWS, COLUMNS, dtype=HALF)]),
    ("view", lambda t: t.half.view(COLUMNS, ROWS)[1:], []),
    ("w", lambda t: torch.rand(COLUMNS, WIDE, device=DEVICE), [counted(COLUMNS, WIDE)]),
    ("m", lambda t: t.x @ t.w, [counted(ROWS, WIDE)]),
    ("total", lambda t: t.m.sum(), [counted(1)]),
    ("columns", lambda t: t.m.mean(0), [counted(WIDE)]),
    ("mask", lambda t: t.m > 0, [counted(ROWS, WIDE, dtype=BOOL)]),
    ("integers", lambda t: t.mask.long(), [counted(ROWS, WIDE, dtype=LONG)]),
    ("best", lambda t: t.m.argmax(1), [counted(ROWS, dtype=LONG)]),
    ("sorted", lambda t: t.x.sort(1), [counted(ROWS, COLUMNS), counted(ROWS, COLUMNS, dtype=LONG)]),
    ("top", lambda t: t.m.topk(5), [counted(ROWS, 5), counted(ROWS, 5, dtype=LONG)]),
    ("both", lambda t: torch.cat([t.x, t.y]), [counted(2 * ROWS, COLUMNS)]),
    ("stack", lambda t: torch.stack([t.x, t.y, t.z]), [counted(3, ROWS, COLUMNS)]),
    ("in_place", lambda t: t.x.add_(1), []),
    ("in_place", lambda t: t.x.relu_(), []),
    ("view", lambda t: t.x.t(), []),
    ("transposed", lambda t: t.x.t().contiguous(), [counted(COLUMNS, ROWS)]),
    ("embedded", lambda t: F.embedding(t.sorted[1], t.w), [counted(ROWS, COLUMNS, WIDE)]),
    ("embedded", lambda t: None, []),
    ("normed", lambda t: F.layer_norm(t.m, (WIDE,)), [counted(ROWS, WIDE)]),
    ("gelu", lambda t: F.gelu(t.m), [counted(ROWS, WIDE)]),
    ("projected", lambda t: F.linear(t.x, t.w.t(), t.columns), [counted(ROWS, WIDE)]),
    ("zeros", lambda t: torch.zeros(MIB + 3, device=DEVICE), [counted(MIB + 3)]),
    ("halves", lambda t: t.zeros.half(), [counted(MIB + 3, dtype=torch.half)]),
    ("squares", lambda t: t.halves[:1000].square(), [counted(1000, dtype=torch.half)]),
    ("zeros", lambda t: None, []),
    ("sums", lambda t: t.m.cumsum(1), [counted(ROWS, WIDE)]),
    ("chosen", lambda t: torch.where(t.mask, t.m, t.sums), [counted(ROWS, WIDE)]),
    ("filled", lambda t: t.m.masked_fill(t.mask, 0.0), [counted(ROWS, WIDE)]),
    ("scattered", lambda t: t.x.scatter(1, t.sorted[1], t.sorted[0]), [counted(ROWS, COLUMNS)]),
    ("gathered", lambda t: t.x.gather(1, t.sorted[1]), [counted(ROWS, COLUMNS)]),
    ("selected", lambda t: t.x.index_select(0, t.best), [counted(ROWS, COLUMNS)]),
    ("indexed", lambda t: t.y[t.best, t.top[1][:, 0] % COLUMNS], [counted(ROWS)]),
    ("filters", lambda t: torch.randn(8, ROWS, 3, device=DEVICE), [counted(8, ROWS, 3)]),
    ("convolved", lambda t: F.conv1d(t.x[None], t.filters), [counted(8, COLUMNS - 2)]),
    ("pooled", lambda t: F.max_pool1d(t.x[None], 2), [counted(ROWS, COLUMNS // 2)]),
    ("moments", lambda t: torch.var_mean(t.m, dim=0), [counted(WIDE), counted(WIDE)]),
    ("spectrum", lambda t: torch.fft.rfft(t.x), [counted(ROWS, COLUMNS // 2 + 1, dtype=COMPLEX)]),
    ("absolute", lambda t: t.spectrum.abs(), [counted(ROWS, COLUMNS // 2 + 1)]),
    ("norm", lambda t: torch.linalg.vector_norm(t.m), [counted(1)]),
    ("products", lambda t: torch.bmm(t.stack, t.stack.mT), [counted(3, ROWS, ROWS)]),
    ("view", lambda t: t.x.expand(4, ROWS, COLUMNS), []),
    ("repeated", lambda t: t.x.repeat(2, 1), [counted(2 * ROWS, COLUMNS)]),
    ("padded", lambda t: F.pad(t.x, (1, 2)), [counted(ROWS, COLUMNS + 3)]),
    ("flipped", lambda t: t.x.flip(0), [counted(ROWS, COLUMNS)]),
    ("triangle", lambda t: torch.tril(t.m), [counted(ROWS, WIDE)]),
    ("one_hot", lambda t: F.one_hot(t.best, WIDE), [counted(ROWS, WIDE, dtype=LONG)]),
    ("range", lambda t: torch.arange(999, device=DEVICE), [counted(999, dtype=LONG)]),
    ("out", lambda t: torch.add(t.x, 1, out=torch.empty(0, device=DEVICE)), [counted(ROWS, COLUMNS)]),
    ("attended", lambda t: F.scaled_dot_product_attention(t.stack, t.stack, t.stack), [counted(3, ROWS, COLUMNS)]),
    ("random", lambda t: torch.bernoulli(t.z), [counted(ROWS, COLUMNS)]),
    ("copied", lambda t: t.half.clone(), [counted(ROWS, COLUMNS, dtype=HALF)]),
]


@pytest.mark.usefixtures("clean_memory")
def test_every_step_of_a_chain_is_counted() -> None:
    base = torch.npu.memory_allocated()
    tensors, held = SimpleNamespace(), {}
    for number, (name, op, sizes) in enumerate(CHAIN):
        setattr(tensors, name, op(tensors))
        if sizes or getattr(tensors, name) is None:
            held[name] = sum(sizes)
        assert torch.npu.memory_allocated() - base == sum(held.values()), (number, name)
    assert sum(bool(sizes) for _, _, sizes in CHAIN) >= 45
    del tensors
    assert torch.npu.memory_allocated() == base


@pytest.mark.usefixtures("clean_memory")
def test_temporaries_of_kernels_are_in_the_peak() -> None:
    x = torch.randn(MIB, device=DEVICE)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x.sort()
    assert torch.npu.max_memory_allocated() - before > 12 * MIB  # the results alone are 12 MiB


@pytest.mark.usefixtures("clean_memory")
def test_results_of_fallbacks_lie_on_the_device() -> None:
    x = torch.randn(64, 64, device=DEVICE)
    for op in (torch.exp, torch.trace, torch.median, torch.linalg.inv, torch.tril, torch.argsort, torch.nonzero):
        result = op(x)
        assert result.untyped_storage().device.type == "npu"


def test_out_of_memory_is_an_error_that_the_process_survives() -> None:
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate.*NPU_SIMULATOR_MEMORY"):
        torch.empty(2 * total, dtype=torch.int8, device=DEVICE)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_out_of_memory_inside_a_fallback_is_the_same_error() -> None:
    total = torch.npu.mem_get_info()[1]
    base = torch.npu.memory_allocated()
    torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + 64 * MIB) / total)
    try:
        x = torch.empty(40 * MIB, dtype=torch.int8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError):
            x.to(torch.int32)
        with pytest.raises(torch.OutOfMemoryError):
            x.sort()
        del x
        assert torch.npu.memory_allocated() == base
        assert torch.empty(40 * MIB, dtype=torch.int8, device=DEVICE).numel() == 40 * MIB
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    stats = torch.npu.memory_stats()
    assert stats["num_ooms"] >= 2


@pytest.mark.usefixtures("clean_memory")
def test_free_memory_between_live_blocks_can_be_used_as_a_whole() -> None:
    total = torch.npu.mem_get_info()[1]
    torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + 200 * MIB) / total)
    try:
        blocks = [torch.empty(10 * MIB, dtype=torch.int8, device=DEVICE) for _ in range(20)]
        del blocks[::2]  # 100 MiB are free, in pieces of 10
        assert torch.empty(100 * MIB, dtype=torch.int8, device=DEVICE).numel() == 100 * MIB
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("clean_memory")
def test_empty_cache_gives_memory_back() -> None:
    reserved = torch.npu.memory_reserved()
    free = torch.accelerator.get_memory_info()[0]
    x = torch.empty(64 * MIB, dtype=torch.int8, device=DEVICE)
    assert torch.accelerator.memory_reserved() >= reserved + 64 * MIB
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= reserved
    assert torch.accelerator.get_memory_info()[0] >= free


def test_pool_of_its_own_joins_the_common_one_at_its_end() -> None:
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        x = torch.ones(4 * MIB, device=DEVICE)
    segments = [s for s in torch.npu.memory_snapshot() if s["segment_pool_id"] == pool.id]
    assert sum(s["allocated_size"] for s in segments) == 16 * MIB
    assert pool.snapshot() == torch.npu.memory_snapshot(pool.id)
    assert pool.use_count() == 1
    number = pool.id
    del pool
    gc.collect()
    assert not [s for s in torch.npu.memory_snapshot() if s["segment_pool_id"] == number]
    assert x.sum().item() == 4 * MIB


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 6 * MIB), st.integers(0, 7)), min_size=1, max_size=60))
def test_any_order_of_allocations_keeps_contents_and_counts(steps: list[tuple[int, int]]) -> None:
    gc.collect()
    base = torch.npu.memory_allocated()
    live: dict[int, torch.Tensor] = {}
    for number, (size, slot) in enumerate(steps):
        live.pop(slot, None)
        live[slot] = torch.full((size,), number % 100, dtype=torch.uint8, device=DEVICE)
        live[slot][-1] = slot + 100
    for number, (size, slot) in enumerate(steps):
        tensor = live.get(slot)
        if tensor is not None and all(later != slot for _, later in steps[number + 1 :]):
            assert tensor.numel() == size
            assert tensor[0].item() == (slot + 100 if size == 1 else number % 100)
            assert tensor[-1].item() == slot + 100
    requested = sum(tensor.numel() for tensor in live.values())
    counted = torch.npu.memory_allocated() - base
    assert requested <= counted <= requested * 1.125 + 512 * len(live)
    live.clear()
    del tensor
    assert torch.npu.memory_allocated() == base


def test_pool_of_another_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="use_on_oom"):
        torch.npu.MemPool(use_on_oom=True)


@pytest.mark.usefixtures("clean_memory")
def test_snapshot_shows_each_tensor_as_a_block(tmp_path: Path) -> None:
    small, large = torch.ones(100, device=DEVICE), torch.ones(3 * MIB, device=DEVICE)
    blocks = [block for segment in torch.npu.memory_snapshot() for block in segment["blocks"]]
    held = {block["address"]: block for block in blocks if block["state"] == "active_allocated"}
    assert held[small.data_ptr()]["requested_size"] == small.nbytes
    assert held[large.data_ptr()]["requested_size"] == large.nbytes
    assert sum(block["size"] for block in held.values()) == torch.npu.memory_allocated()
    assert sum(block["size"] for block in blocks) == torch.npu.memory_reserved()
    torch.npu.memory._dump_snapshot(tmp_path / "snapshot.pickle")
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["segments"] == torch.npu.memory_snapshot()


def test_memory_without_a_tensor() -> None:
    held, used = torch.npu.memory_allocated(), torch.npu.device_memory_used()
    address = torch.npu.caching_allocator_alloc(4 * MIB)
    assert torch.npu.memory_allocated() == held + 4 * MIB
    assert torch.npu.device_memory_used() >= min(used, held + 4 * MIB)
    torch.npu.caching_allocator_delete(address)
    assert torch.npu.memory_allocated() == held
    with pytest.raises(ValueError, match="not an address of device memory"):
        torch.npu.caching_allocator_delete(64)


@pytest.mark.parametrize("size", [1000, 4 * MIB])
def test_memory_is_freed_once_and_by_its_first_byte(size: int) -> None:
    address = torch.npu.caching_allocator_alloc(size)
    with pytest.raises(ValueError, match="not the address of memory in use"):
        torch.npu.caching_allocator_delete(address + 8)
    torch.npu.caching_allocator_delete(address)
    for gone in (address, address + 8):
        with pytest.raises(ValueError, match="freed before, or never allocated"):
            torch.npu.caching_allocator_delete(gone)
    first, second = (torch.empty(size, dtype=torch.int8, device=DEVICE) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_more_memory_than_there_are_addresses() -> None:
    held = torch.npu.memory_allocated()
    for size in (2**64 - 1, 2**64 - 512, 2**63):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.npu.caching_allocator_alloc(size)
    assert torch.npu.memory_allocated() == held


@pytest.mark.usefixtures("clean_memory")
@pytest.mark.skipif("NPU_DEBUG" in os.environ, reason="NPU_DEBUG=memory caches nothing")
def test_what_a_pool_has_cached_is_released_when_asked_for_or_wanted() -> None:
    pool = torch.npu.MemPool()
    total = torch.npu.mem_get_info()[1]

    def fill_and_free(count: int = 40 * MIB) -> None:
        with torch.npu.use_mem_pool(pool):
            torch.empty(count, dtype=torch.int8, device=DEVICE)

    base = torch.npu.memory_reserved()
    fill_and_free()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == base + 40 * MIB, "of the common pool alone"
    pool.empty_cache()
    assert torch.npu.memory_reserved() == base
    torch.npu.set_per_process_memory_fraction((base + 64 * MIB) / total)
    try:
        fill_and_free()
        fill_and_free(1000)
        assert torch.empty(50 * MIB, dtype=torch.int8, device=DEVICE).numel() == 50 * MIB
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("clean_memory")
def test_the_pool_of_a_graph_is_not_released_under_it() -> None:
    x = torch.ones(4 * MIB, device=DEVICE)
    total = torch.npu.mem_get_info()[1]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = ((x + 1) * 2).sum()
    reserved = torch.npu.memory_reserved()
    torch.npu.memory._C.empty_cache_of_pool(graph.pool()[1])
    assert torch.npu.memory_reserved() == reserved
    torch.npu.set_per_process_memory_fraction((reserved + 2 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(16 * MIB, dtype=torch.int8, device=DEVICE)
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    graph.replay()
    assert y.item() == 16 * MIB


def test_a_pool_that_dies_while_it_is_used_joins_the_common_one_after() -> None:
    pool = torch.npu.MemPool()
    number = pool.id
    scope = torch.npu.memory._C.PoolScope(number[1])
    del pool
    gc.collect()
    x = torch.ones(4 * MIB, device=DEVICE)
    assert [s for s in torch.npu.memory_snapshot() if s["segment_pool_id"] == number]
    scope.leave()
    assert not [s for s in torch.npu.memory_snapshot() if s["segment_pool_id"] == number]
    assert x.sum().item() == 4 * MIB


def test_pinned_memory_is_counted() -> None:
    torch.npu.empty_host_cache()
    torch.npu.reset_peak_host_memory_stats()
    before = torch.npu.host_memory_stats()
    pinned = torch.empty(100_000, dtype=torch.int8, pin_memory=True)
    during = torch.npu.host_memory_stats()
    del pinned
    after = torch.npu.host_memory_stats()
    size = 1 << 17
    assert during["active_bytes.current"] - before["active_bytes.current"] == size
    assert after["active_bytes.current"] == before["active_bytes.current"]
    assert after["active_bytes.peak"] - before["active_bytes.current"] == size
    assert after["allocated_bytes.current"] - before["allocated_bytes.current"] == size  # it is cached
    assert after["num_host_alloc"] == before["num_host_alloc"] + 1
    torch.npu.empty_host_cache()
    assert (
        torch.npu.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"] == before["allocated_bytes.current"]
    )
    torch.npu.reset_accumulated_host_memory_stats()
    assert torch.npu.host_memory_stats()["active_bytes.allocated"] == 0


def test_pinned_memory() -> None:
    pinned = torch.ones(1000, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[10:].is_pinned()
    assert torch.ones(10).pin_memory().is_pinned()
    assert not torch.ones(10).is_pinned()
    copied = pinned.to(DEVICE, non_blocking=True)
    assert torch.equal(copied.cpu(), pinned)
    torch.accelerator.empty_host_cache()


def test_large_pinned_memory_is_rounded_to_pages_and_used_again() -> None:
    torch.npu.empty_host_cache()
    before = torch.npu.host_memory_stats()["allocated_bytes.current"]

    def allocated() -> int:
        return torch.npu.host_memory_stats()["allocated_bytes.current"] - before

    first = torch.empty(5 * MIB + 1, dtype=torch.int8, pin_memory=True)
    assert allocated() == 5 * MIB + 4096
    address = first.data_ptr()
    del first
    again = torch.empty(5 * MIB - 9000, dtype=torch.int8, pin_memory=True)
    assert again.data_ptr() == address
    smaller = torch.empty(2 * MIB, dtype=torch.int8, pin_memory=True)
    del again
    other = torch.empty(3 * MIB, dtype=torch.int8, pin_memory=True)
    assert other.data_ptr() != address, "more than an eighth of it would lie idle"
    assert allocated() == 10 * MIB + 4096
    del smaller, other
    torch.npu.empty_host_cache()
    assert allocated() == 0


def test_no_more_pinned_memory_is_an_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="free pinned tensors, or pin less"):
        torch.empty(1 << 60, dtype=torch.int8, pin_memory=True)
