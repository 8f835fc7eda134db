"""Owns what a process's first launch waits for and can be done before it: the hash of Triton's own library."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from npu_platform import compat
from npu_platform.triton import build

__all__ = ["hash_triton"]

_PLACES = ("triton.runtime.cache", "triton.compiler.compiler")  # the second until Triton 3.5


def hash_triton() -> threading.Thread | None:
    """Let a thread compute Triton's part of the cache's keys, and return it; None: this Triton keeps it elsewhere.

    It hashes all of libtriton.so, 460 MB, for which the first launch waited. Triton keeps
    what comes out; a launch that comes before it computes it once more.
    """
    for place in _PLACES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(place)
            key = getattr(module, "triton_key", None)
            if hasattr(key, "cache_info"):
                thread = threading.Thread(target=_compute, args=(module, key), name="npu-triton-key", daemon=True)
                thread.start()
                return thread
    return None


def _compute(module: ModuleType, key: Callable[[], str]) -> None:
    """Let Triton compute its key, with the hash of its library from the cache if that is the one that was hashed."""
    with compat.known_hash(module, _hash_of_library()):
        key()


def _hash_of_library() -> str:
    """Return the hash of libtriton.so, kept in Triton's cache for this path, size and time of change."""
    import triton

    extension = sysconfig.get_config_var("EXT_SUFFIX").split(".")[-1]  # as Triton names it
    library = Path(triton.__file__).parent / "_C" / f"libtriton.{extension}"
    found = library.stat()
    this = hashlib.sha256(f"{library}\n{found.st_size}\n{found.st_mtime_ns}".encode()).hexdigest()[:16]
    kept = build.own_folder() / f"libtriton-{this}.txt"
    if os.access(kept, os.R_OK):
        return kept.read_text()
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that this user may only read
        build.write_once(kept, digest.encode())
    return digest
