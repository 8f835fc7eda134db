"""Owns the picture of device memory: segments and the blocks in them, as PyTorch's memory viewer reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_platform import _C

from .devices import device_count

if TYPE_CHECKING:
    import os

__all__ = ["memory_snapshot"]


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Return the segments of all devices: addresses and sizes in bytes, pool, and the blocks that tensors hold.

    Args:
        mempool_id: only segments of this pool, by the ``id`` of a ``MemPool`` or the handle of a graph's pool.
        include_traces: accepted for the signature's sake: allocations are not traced.
    """
    del include_traces
    segments = []
    for device in range(device_count()):
        live = _C.live_memory(device)
        segments += [
            segment | {"stream": 0, "frames": [], "blocks": _blocks(segment, live)}
            for segment in _C.memory_snapshot(device)
            if mempool_id is None or segment["segment_pool_id"] == mempool_id
        ]
    return segments


def _snapshot() -> dict[str, Any]:
    """Return what ``torch.cuda.memory._snapshot`` returns; allocations are not traced."""
    return {
        "segments": memory_snapshot(),
        "device_traces": [[] for _ in range(device_count())],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(filename: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Write :func:`_snapshot` to a file that https://docs.pytorch.org/memory_viz draws."""
    Path(filename).write_bytes(pickle.dumps(_snapshot()))


def _blocks(segment: dict[str, Any], live: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Return the blocks of a segment in order, the gaps between them as inactive ones."""
    begin, end = segment["address"], segment["address"] + segment["total_size"]
    blocks = []
    for address, requested, size in live:
        if not begin <= address < end:
            continue
        if address > begin:
            blocks.append(_block(begin, address - begin, 0, "inactive"))
        blocks.append(_block(address, size, requested, "active_allocated"))
        begin = address + size
    if begin < end:
        blocks.append(_block(begin, end - begin, 0, "inactive"))
    return blocks


def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}
