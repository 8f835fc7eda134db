"""Owns pools of device memory that sleep: the device has their memory back, their tensors keep their addresses."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from npu_platform import _C

from .devices import Device, index_of

if TYPE_CHECKING:
    from .memory import MemPool

__all__ = ["SuspendedPool", "can_suspend_pools", "suspend_pool"]

_ALIGNMENT = 64


def can_suspend_pools() -> bool:
    """Say whether the device's driver takes memory back while tensors keep its addresses; no device is brought up."""
    return _C.can_suspend()


def suspend_pool(
    pool: MemPool | tuple[int, int], *, keep: bool = True, folder: Path | None = None, device: Device = None
) -> SuspendedPool:
    """Give the memory of ``pool`` back to its device until ``resume()``; without ``keep`` its contents are lost.

    Meanwhile nothing may use its tensors: an access ends the process on the software NPU, as it does on other devices,
    and an allocation from the pool raises RuntimeError. Tensors may be freed, and graphs that refer to them stay valid.

    Args:
        pool: a :class:`~torch.npu.MemPool`, or the handle of a graph's pool.
        keep: copy what its tensors hold to the host, and back.
        folder: keep the copy in an unnamed file there instead of in the host's memory.
        device: the device whose part of the pool sleeps; None: the current one.

    Raises:
        RuntimeError: the pool sleeps already, or the device's driver cannot do so.
        OSError: the folder cannot hold the copy; the pool has not gone to sleep then.
    """
    return SuspendedPool(pool if isinstance(pool, tuple) else pool.id, keep, folder, index_of(device))


class SuspendedPool:
    """A pool that sleeps; made by :func:`suspend_pool`."""

    def __init__(self, handle: tuple[int, int], keep: bool, folder: Path | None, device: int) -> None:
        self._pool, self._device = handle[1] or handle[0], device
        if _C.pool_sleeps(device, self._pool):
            msg = f"the memory pool {handle} is asleep already: resume it first"
            raise RuntimeError(msg)
        torch.accelerator.synchronize(device)
        pieces = _C.live_memory_of_pool(device, self._pool) if keep else []
        self._copy = _HostCopy(pieces, folder)
        self._copy.save()
        self.bytes: int = _C.suspend_pool(device, self._pool)
        """What the device has got back."""
        self.kept: int = self._copy.size
        """Bytes of the host that the copy takes."""
        _C.retain_pool(self._pool)  # a pool that merges into the default one must have its memory

    def resume(self) -> None:
        """Take the memory again, with what the tensors held where that was kept, else zeros.

        Raises:
            torch.OutOfMemoryError: the device has not as much any more; the pool sleeps on, and can be resumed later.
        """
        _C.resume_pool(self._device, self._pool)
        self._copy.restore(set(_C.live_memory_of_pool(self._device, self._pool)))
        _C.release_pool(self._pool)


class _HostCopy:
    """What pieces of device memory, (address, bytes), held, one after the other in a mapping of the host."""

    def __init__(self, pieces: list[tuple[int, int]], folder: Path | None) -> None:
        self._pieces = pieces
        self.size = sum(_aligned(size) for _, size in pieces)
        self._mapping = _mapping(self.size, folder) if self.size else None
        self._in_file = folder is not None

    def save(self) -> None:
        """Copy all pieces to the host."""
        if self._mapping is None:
            return
        self._copy({*self._pieces}, to_host=True)
        if self._in_file:
            self._mapping.flush()
            self._mapping.madvise(mmap.MADV_DONTNEED)  # what is written leaves the memory of this process

    def restore(self, wanted: set[tuple[int, int]]) -> None:
        """Copy those pieces back that are among `wanted`, and let go of the host's memory."""
        if self._mapping is None:
            return
        self._copy(wanted, to_host=False)
        self._mapping.close()
        self._mapping = None

    def _copy(self, wanted: set[tuple[int, int]], to_host: bool) -> None:
        view = torch.frombuffer(self._mapping, dtype=torch.uint8)
        host = view.data_ptr()
        for address, size in self._pieces:
            if (address, size) in wanted:
                _C.copy_memory(*((host, address) if to_host else (address, host)), size)
            host += _aligned(size)
        torch.accelerator.synchronize()


def _mapping(size: int, folder: Path | None) -> mmap.mmap:
    if folder is None:
        return mmap.mmap(-1, size)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk would otherwise end the process while it writes
        return mmap.mmap(file.fileno(), size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
