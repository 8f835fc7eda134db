"""Pools that sleep: the device and the system have their memory back, addresses stay, contents come back where asked."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from .conftest import RunPython

DEVICE = "npu"
MIB = 1 << 20
FENCED = pytest.mark.skipif("NPU_DEBUG" in os.environ, reason="NPU_DEBUG=memory counts what tensors hold alone")


def resident() -> int:
    """Return the bytes of this process that are in the system's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pool_of(*values: float, count: int = 8 * MIB) -> tuple[torch.npu.MemPool, list[torch.Tensor]]:
    """Return a pool and float32 tensors in it, `count` elements each."""
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        return pool, [torch.full((count,), value, device=DEVICE) for value in values]


@pytest.mark.usefixtures("clean_memory")
@pytest.mark.parametrize("in_folder", [False, True])
def test_contents_and_addresses_come_back(in_folder: bool, tmp_path: Path) -> None:
    pool, large = pool_of(1.5, -2.5)
    with torch.npu.use_mem_pool(pool):
        small = torch.arange(1000, device=DEVICE)
    addresses = [x.data_ptr() for x in (*large, small)]
    free, before = torch.npu.mem_get_info()[0], resident()
    asleep = torch.npu.suspend_pool(pool, folder=tmp_path if in_folder else None)
    assert asleep.bytes >= 64 * MIB
    assert torch.npu.mem_get_info()[0] == free + asleep.bytes
    assert 64 * MIB <= asleep.kept <= asleep.bytes
    assert (resident() <= before - 60 * MIB) == in_folder
    asleep.resume()
    assert resident() <= before + 8 * MIB
    assert torch.npu.mem_get_info()[0] == free
    assert [x.data_ptr() for x in (*large, small)] == addresses
    assert [x.unique().tolist() for x in large] == [[1.5], [-2.5]]
    assert torch.equal(small.cpu(), torch.arange(1000))


@pytest.mark.usefixtures("clean_memory")
def test_what_is_not_kept_reads_as_zero_and_takes_no_memory() -> None:
    pool, (x,) = pool_of(3.0, count=32 * MIB)
    before = resident()
    asleep = torch.npu.suspend_pool(pool, keep=False)
    assert asleep.kept == 0
    assert resident() <= before - 120 * MIB
    asleep.resume()
    assert x.count_nonzero().item() == 0
    assert x.fill_(1).sum().item() == 32 * MIB


@FENCED
def test_reserved_bytes_are_those_of_what_is_awake() -> None:
    pool, _tensors = pool_of(1.0)
    reserved = torch.npu.memory_reserved()
    asleep = torch.npu.suspend_pool(pool)
    assert torch.npu.memory_reserved() == reserved - asleep.bytes
    asleep.resume()
    assert torch.npu.memory_reserved() == reserved


def test_tensors_may_die_in_their_sleep() -> None:
    pool, tensors = pool_of(1.0, 2.0, 3.0)
    with torch.npu.use_mem_pool(pool):
        small = [torch.full((100,), i, device=DEVICE) for i in range(10)]
    allocated = torch.npu.memory_allocated()
    asleep = torch.npu.suspend_pool(pool)
    del tensors[1], small[::2]
    gc.collect()
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() < allocated - 30 * MIB
    asleep.resume()
    assert [x[-1].item() for x in tensors] == [1.0, 3.0]
    assert [int(x.sum().item()) for x in small] == [100, 300, 500, 700, 900]
    with torch.npu.use_mem_pool(pool):
        assert torch.full((8 * MIB,), 7.0, device=DEVICE).min().item() == 7
    assert [x[0].item() for x in tensors] == [1.0, 3.0]


def test_a_pool_that_died_in_its_sleep_wakes_for_its_tensors() -> None:
    pool, (x,) = pool_of(4.0)
    asleep = torch.npu.suspend_pool(pool)
    del pool
    gc.collect()
    asleep.resume()
    assert x.min().item() == x.max().item() == 4


def test_graphs_go_on_after_their_weights_and_their_own_memory_slept() -> None:
    pool, (weight,) = pool_of(2.0, count=512 * 512)
    weight = weight.view(512, 512)
    x, graph = torch.ones(4, 512, device=DEVICE), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x @ weight).relu() + 1
    graph.replay()
    expected = y.cpu()
    sleepers = [torch.npu.suspend_pool(pool), torch.npu.suspend_pool(graph.pool())]
    for asleep in sleepers:
        asleep.resume()
    assert torch.equal(y.cpu(), expected), "what the graph's memory held"
    x.fill_(2)
    graph.replay()
    assert y.unique().tolist() == [2 * 2 * 512 + 1]
    discarded = torch.npu.suspend_pool(pool, keep=False)
    discarded.resume()
    weight.fill_(1)
    graph.replay()
    assert y.unique().tolist() == [2 * 512 + 1]


def test_wrong_calls_are_refused() -> None:
    pool, (x,) = pool_of(1.0)
    asleep = torch.npu.suspend_pool(pool)
    with pytest.raises(RuntimeError, match="asleep already: resume it first"):
        torch.npu.suspend_pool(pool)
    with torch.npu.use_mem_pool(pool), pytest.raises(RuntimeError, match="is asleep: resume it before"):
        torch.empty(MIB, device=DEVICE)
    asleep.resume()
    with pytest.raises(RuntimeError, match="is not asleep"):
        asleep.resume()
    with pytest.raises(RuntimeError, match="the default pool cannot sleep"):
        torch.npu.suspend_pool((0, 0))
    assert x.max().item() == 1


def test_a_folder_that_cannot_hold_the_copy_lets_the_pool_awake(tmp_path: Path) -> None:
    pool, (x,) = pool_of(1.0)
    with pytest.raises(OSError, match="gone"):
        torch.npu.suspend_pool(pool, folder=tmp_path / "gone")
    assert x.max().item() == 1


@FENCED
@pytest.mark.usefixtures("clean_memory")
def test_waking_up_without_memory_fails_whole_and_can_be_tried_again() -> None:
    pool, tensors = pool_of(1.0, 2.0)
    total = torch.npu.mem_get_info()[1]
    asleep = torch.npu.suspend_pool(pool)
    taken = torch.empty(50 * MIB, dtype=torch.int8, device=DEVICE)
    torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + 40 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="sleeps on"):
            asleep.resume()
        del taken  # cached, which gives way
        asleep.resume()
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)
    assert [x.max().item() for x in tensors] == [1, 2]


MISUSE = """
import torch
pool = torch.npu.MemPool()
with torch.npu.use_mem_pool(pool): x = torch.ones(1 << 20, device="npu")
asleep = torch.npu.suspend_pool(pool)
print("alive", flush=True)
x.add_(1)
print("not reached")
"""


@pytest.mark.parametrize("debug", ["", "memory"])
def test_who_uses_what_sleeps_is_stopped(debug: str, run_python: RunPython) -> None:
    done = run_python(MISUSE, **{"NPU_DEBUG": debug} if debug else {})
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "alive\n"
    assert ("of the tensor memory of 4194304 bytes" in done.stderr) == bool(debug), done.stderr


CHECKED = """
import torch
pool = torch.npu.MemPool()
with torch.npu.use_mem_pool(pool):
    tensors = [torch.full((n,), n, device="npu") for n in range(1, 3000, 91)]
    del tensors[::3]
asleep = torch.npu.suspend_pool(pool)
del tensors[::4]
torch.ones(5, device="npu").sum()
asleep.resume()
print(all(x.eq(len(x)).all() for x in tensors))
with torch.npu.use_mem_pool(pool): tensors += [torch.full((n,), n, device="npu") for n in range(1, 3000, 71)]
print(all(x.eq(len(x)).all() for x in tensors))
asleep = torch.npu.suspend_pool(pool, keep=False)
asleep.resume()
print(all(not x.any() for x in tensors))
"""


def test_fences_stand_after_the_sleep(run_python: RunPython) -> None:
    done = run_python(CHECKED, NPU_DEBUG="memory")
    assert done.stdout == "True\n" * 3, done.stderr
    assert "memory check" not in done.stderr
