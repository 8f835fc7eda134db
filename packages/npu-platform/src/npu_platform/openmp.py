"""Owns how the threads of OpenMP, on which torch's CPU kernels run, live with forks and with the device's own threads.

Only libgomp, which PyTorch's wheels bring, needs and gets any of it; elsewhere the functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path

__all__ = ["end_threads", "sleep_after_loops"]

_SOFT = 1  # omp_pause_soft: the threads end, and the next loop starts others
_POLICY = b"OMP_WAIT_POLICY="


def end_threads() -> None:
    """End the OpenMP threads of this thread, before it forks: the child's first loop would wait for them for ever."""
    pause = _function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@functools.cache
def sleep_after_loops() -> None:
    """Let OpenMP's threads sleep soon after a loop, unless OMP_WAIT_POLICY was there when libgomp was loaded.

    They otherwise spin for milliseconds, on the cores of the device's own threads. libgomp reads the variable when it
    is loaded; in a forked engine process, and in a program with an engine inside, that was before anybody could set
    it. But it spins a 300th of that time where it has more threads than there are cores, so there are some more.
    """
    parallel = _function("GOMP_parallel")
    if parallel is not None and _POLICY not in Path("/proc/self/environ").read_bytes():
        threading.Thread(target=_keep_threads, args=(parallel,), name="npu-openmp", daemon=True).start()


def _keep_threads(parallel: ctypes._FuncPointer) -> None:
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
    parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)
    threading.Event().wait()  # they live as long as this thread


def _function(name: str) -> ctypes._FuncPointer | None:
    """Return a function of libgomp, which torch has loaded for the whole process, or None."""
    return getattr(ctypes.CDLL(None), name, None)
