"""Owns what a process's first launch waits for and can be done before it: the hash of Triton's own library."""

from __future__ import annotations

import contextlib
import importlib
import threading

__all__ = ["hash_triton"]

_PLACES = ("triton.runtime.cache", "triton.compiler.compiler")  # the second until Triton 3.5


def hash_triton() -> threading.Thread | None:
    """Let a thread compute Triton's part of the cache's keys, and return it; None: this Triton keeps it elsewhere.

    It reads all of libtriton.so, 460 MB, for which the first launch waited. Triton keeps
    what comes out; a launch that comes before it computes it once more.
    """
    for place in _PLACES:
        with contextlib.suppress(ImportError):
            key = getattr(importlib.import_module(place), "triton_key", None)
            if hasattr(key, "cache_info"):
                thread = threading.Thread(target=key, name="npu-triton-key", daemon=True)
                thread.start()
                return thread
    return None
