"""Owns the process group backend ``npuccl``: collectives of npu tensors, over shared memory within one host."""

from __future__ import annotations

import functools
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["BACKEND", "make_backend"]

BACKEND = "npuccl"
logger = logging.getLogger("vllm.npu_platform.distributed")


def register_backend() -> None:
    """Register ``npuccl`` for npu tensors, e.g. ``init_process_group("cpu:gloo,npu:npuccl")``."""
    if torch.distributed.is_available() and not hasattr(torch.distributed.Backend, BACKEND.upper()):
        torch.distributed.Backend.register_backend(BACKEND, make_backend, devices=["npu"])


def make_backend(
    store: torch.distributed.Store, rank: int, size: int, timeout: timedelta
) -> torch._C._distributed_c10d.Backend:
    """Return the collectives of rank `rank` of `size`, which meet at `store`, outside of any ``ProcessGroup``."""
    from npu_platform import _C

    gloo = functools.partial(torch.distributed.ProcessGroupGloo, timeout=timeout)
    backend, refusal = _C.make_process_group(gloo(store, rank, size), store, _host_name(), gloo)
    if refusal:
        _say_once_that_gloo_is_used(refusal)
    return backend


@functools.cache
def _host_name() -> str:
    """Return what only processes that can share memory with this one have in common, "" when that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


@functools.cache
def _say_once_that_gloo_is_used(refusal: str) -> None:
    logger.warning("npuccl: ranks do not share memory, so their collectives go through gloo: %s", refusal)
