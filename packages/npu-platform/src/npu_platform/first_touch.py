"""Touches the KV cache's memory while the processor has nothing else to do, so that the first requests need not.

The host gives out a page of memory when it is first written. The software NPU's memory is the host's, and where the
first requests write the cache, a seventh of their time has been seen to go to its pages (virtual machine, huge pages).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FirstTouch", "ranges_of"]

logger = init_logger("vllm.npu_platform.first_touch")

Range = tuple[int, int]
"""An address and bytes, whole pages."""

PART = 2 << 20  # bytes touched at once: a huge page
PATIENCE = 3.0  # seconds after the start: a test or a tool is gone by then, and has not paid for what it never uses
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: as if each page were written, contents stay
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FirstTouch:
    """A thread that touches ranges of memory once, all of them at the same pace, until it is done or stopped."""

    def __init__(self, ranges: Sequence[Range], most: int, patience: float = PATIENCE) -> None:
        """Begin after `patience` seconds, and touch `most` bytes."""
        self.touched = 0
        """Bytes so far."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(list(ranges), most, patience), name="npu first touch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when no memory is touched any more; the ranges may be given back then."""
        self._stop.set()
        self._thread.join()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end, and say whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, ranges: list[Range], most: int, patience: float) -> None:
        if self._stop.wait(patience):
            return
        with contextlib.suppress(OSError):  # of this thread alone: only where nobody else wants the processor
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        for address, size in in_turns(ranges):
            if self._stop.is_set() or self.touched >= most:
                return
            if _LIBC.madvise(address, size, _POPULATE_WRITE):
                why = ctypes.get_errno()
                if why != errno.EINTR:  # an older kernel, or no memory left: requests touch it, as ever
                    logger.debug("The KV cache's memory is not touched ahead: %s.", os.strerror(why))
                    return
            self.touched += size


def ranges_of(caches: Iterable[torch.Tensor | Sequence[torch.Tensor]]) -> list[Range]:
    """Return the whole pages of each cache; where it has keys and values apart, of either.

    caches: of each layer, blocks first or second: (blocks, ...) or (2, blocks, ...); several with states.
    """
    found: dict[Range, None] = {}  # layers may share theirs
    for cache in (each for layer in caches for each in ([layer] if isinstance(layer, torch.Tensor) else layer)):
        apart = cache.dim() > 1 and cache.shape[0] == 2 and cache.is_contiguous()
        for each in cache.unbind(0) if apart else (cache,):
            storage = each.untyped_storage()
            first, size = (
                (each.data_ptr(), each.nbytes) if each.is_contiguous() else (storage.data_ptr(), storage.nbytes())
            )
            start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                found[start, end - start] = None
    return list(found)


def in_turns(ranges: Iterable[Range]) -> Iterable[Range]:
    """Yield parts of all ranges in turn, each from its beginning: blocks of a cache are given out in this order."""
    rest = list(ranges)
    while rest:
        yield from ((address, min(size, PART)) for address, size in rest)
        rest = [(address + PART, size - PART) for address, size in rest if size > PART]
