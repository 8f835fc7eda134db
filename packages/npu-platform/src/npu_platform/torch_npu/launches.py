"""Owns what is asked about kernel launches: how many there were, and which are not to compute."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from npu_platform import _C

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["launch_counts", "skip_kernels"]


def launch_counts() -> tuple[int, int]:
    """Return how many kernels were launched since the start, and how many of them were fallbacks to CPU kernels."""
    return _C.launch_counts()


@contextlib.contextmanager
def skip_kernels(*names: str) -> Iterator[None]:
    """Launch kernels of these names, on this thread, without running them: their outputs are allocated, not written.

    For a run that is made for its allocations alone, as vLLM's memory profile. The names are those of launched
    kernels, ``"npu_ops::linear"`` for one, and ``"aten::linear"``; another op of PyTorch cannot be skipped, since only
    its kernel knows what it allocates.

    Raises:
        ValueError: a name is that of an ATen op other than ``aten::linear``.
    """
    for name in names:
        if name.startswith("aten::") and name != "aten::linear":
            msg = f"skip_kernels: {name!r} allocates inside its kernel; of ATen, only 'aten::linear' can be skipped"
            raise ValueError(msg)
    scope = _C.SkipScope(set(names))
    try:
        yield
    finally:
        scope.leave()
