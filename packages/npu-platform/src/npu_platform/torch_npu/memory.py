"""Owns what a process sees of device memory: how much there is, what tensors hold, pools."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from npu_platform import _C

from .devices import Device, check_device, index_of
from .snapshots import _dump_snapshot, _snapshot, memory_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [  # with the private names by which torch.cuda.memory offers its snapshots
    "MemPool",
    "OutOfMemoryError",
    "_dump_snapshot",
    "_snapshot",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_enable",
    "device_memory_used",
    "empty_cache",
    "empty_host_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
]

OutOfMemoryError = torch.OutOfMemoryError


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total memory of a device in bytes."""
    return torch.accelerator.get_memory_info(index_of(device))


def device_memory_used(device: Device = None) -> int:
    """Return the bytes of a device's memory that are in use, cached ones included."""
    free, total = mem_get_info(device)
    return total - free


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return the counters of the allocator, named as those of ``torch.cuda.memory_stats``."""
    return torch.accelerator.memory_stats(index_of(device))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return :func:`memory_stats` with a dictionary for each part of a name: ``["allocated_bytes"]["all"]["peak"]``."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def memory_allocated(device: Device = None) -> int:
    """Return the bytes that tensors hold now."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    """Return the most bytes that tensors held since the start or the last reset, temporaries of kernels included."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    """Return the bytes that the allocator has taken from the device: held by tensors, cached, or kept for graphs."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    """Return the most bytes that the allocator had taken since the start or the last reset."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let the peaks start again from what is held now."""
    torch.accelerator.reset_peak_memory_stats(index_of(device))


reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Let the totals start again from zero."""
    torch.accelerator.reset_accumulated_memory_stats(index_of(device))


def empty_cache() -> None:
    """Give memory that no tensor and no graph holds back to the devices."""
    torch.accelerator.empty_cache()


def empty_host_cache() -> None:
    """Free cached pinned host memory."""
    torch.accelerator.empty_host_cache()


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return what tensors hold, what is reserved and their peaks, as text for people; it is always abbreviated."""
    del abbreviated
    free, total = mem_get_info(device)
    rows = {
        "allocated": (memory_allocated(device), max_memory_allocated(device)),
        "reserved": (memory_reserved(device), max_memory_reserved(device)),
    }
    lines = [f"npu:{index_of(device)}  total {total / 2**20:.1f} MiB, free {free / 2**20:.1f} MiB"]
    lines += [
        f"{name:<10} {now / 2**20:10.1f} MiB now {peak / 2**20:10.1f} MiB peak" for name, (now, peak) in rows.items()
    ]
    return "\n".join(lines)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Let this process use at most ``fraction`` (0 to 1) of a device's memory.

    Raises:
        ValueError: ``fraction`` is outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        msg = f"fraction must be from 0 to 1, got {fraction}"
        raise ValueError(msg)
    _free, total = mem_get_info(device)
    _C.set_memory_limit(index_of(device), int(fraction * total))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """Return the part (0 to 1) of a device's memory that this process may use."""
    _free, total = mem_get_info(device)
    return _C.memory_limit(index_of(device)) / total


class MemPool:
    """A pool of device memory of its own; what is left of it joins the common pool when the object dies.

    Args:
        allocator: None; another allocator cannot be plugged in.
        use_on_oom: False; memory of the pool is never lent to allocations outside it.
        no_split: False; blocks of the pool are split as others are.

    Raises:
        NotImplementedError: an argument has another value.
    """

    def __init__(self, allocator: None = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if allocator is not None or use_on_oom or no_split:
            msg = "MemPool on npu takes no allocator, use_on_oom or no_split: leave them at their defaults"
            raise NotImplementedError(msg)
        self.id: tuple[int, int] = (0, _C.new_pool_id())
        _C.retain_pool(self.id[1])

    def __del__(self, release: Callable[[int], None] = _C.release_pool) -> None:
        """Let go of the pool; `release` is held here because this module's names are gone at the end of a program."""
        if hasattr(self, "id"):
            release(self.id[1])

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the segments of this pool, as :func:`memory_snapshot` does."""
        return memory_snapshot(self.id, include_traces)

    def empty_cache(self) -> None:
        """Give memory of this pool that no tensor holds back to the devices."""
        _C.empty_cache_of_pool(self.id[1])

    def use_count(self) -> int:
        """Return how many hold the pool: this object, and the graphs captured into it."""
        return _C.pool_users(self.id[1])


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    """Allocate this thread's npu tensors from ``pool`` inside the context."""
    check_device(device)
    scope = _C.PoolScope(pool.id[1])
    try:
        yield
    finally:
        scope.leave()


@contextlib.contextmanager
def outside_pools() -> Iterator[None]:
    """Allocate this thread's npu tensors from the common pool inside the context, whatever pool is used around it."""
    scope = _C.PoolScope(0)
    try:
        yield
    finally:
        scope.leave()


def caching_allocator_alloc(size: int, device: Device = None, stream: torch.Stream | None = None) -> int:
    """Return the address of ``size`` bytes of device memory, held until :func:`caching_allocator_delete`."""
    del stream
    return _C.allocate(index_of(device), size)


def caching_allocator_delete(mem_ptr: int) -> None:
    """Let go of memory of :func:`caching_allocator_alloc`.

    Raises:
        ValueError: ``mem_ptr`` is not an address of device memory.
    """
    _C.release(mem_ptr)


def get_allocator_backend() -> str:
    """Return ``"native"``: the only allocator there is."""
    return "native"


def caching_allocator_enable(value: bool = True) -> None:
    """Accept True; the allocator of this device cannot be turned off.

    Raises:
        NotImplementedError: ``value`` is False.
    """
    if not value:
        msg = "the allocator of the npu device cannot be turned off; call empty_cache() instead"
        raise NotImplementedError(msg)
