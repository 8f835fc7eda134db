"""Owns the process group backend ``npuccl``: collectives of npu tensors over gloo, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["BACKEND"]

BACKEND = "npuccl"


def register_backend() -> None:
    """Register ``npuccl`` for npu tensors, e.g. ``init_process_group("cpu:gloo,npu:npuccl")``."""
    if torch.distributed.is_available() and not hasattr(torch.distributed.Backend, BACKEND.upper()):
        torch.distributed.Backend.register_backend(BACKEND, _create, devices=["npu"])


def _create(
    store: torch.distributed.Store, rank: int, size: int, timeout: timedelta
) -> torch._C._distributed_c10d.Backend:
    from npu_platform import _C

    host = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    return _C.make_process_group(host)
