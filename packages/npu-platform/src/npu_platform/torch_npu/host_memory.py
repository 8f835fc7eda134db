"""Owns what a process sees of pinned host memory."""

from __future__ import annotations

from typing import Any

from npu_platform import _C

__all__ = [
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
]


def host_memory_stats() -> dict[str, Any]:
    """Return the counters of the allocator of pinned memory, named as those of ``torch.cuda.host_memory_stats``."""
    flat: dict[str, Any] = {}
    for name, value in host_memory_stats_as_nested_dict().items():
        flat |= {f"{name}.{part}": count for part, count in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return :func:`host_memory_stats` with a dictionary for each counter: ``["allocated_bytes"]["peak"]``."""
    return _C.host_memory_stats()


def reset_peak_host_memory_stats() -> None:
    """Let the peaks start again from what is held now."""
    _C.reset_peak_host_memory_stats()


def reset_accumulated_host_memory_stats() -> None:
    """Let the totals start again from zero."""
    _C.reset_accumulated_host_memory_stats()
