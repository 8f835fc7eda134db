"""Owns how often the threads that process groups leave behind wake up for nothing.

Each of gloo's groups has a thread that waits for its sockets, and looks up from that a hundred times a second (gloo's
``transport/tcp/loop.cc``). vLLM makes thirteen such groups in every rank, one alone included: 1,300 times a second they
took a core from the rank's own thread, or woke it up.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SLACK", "seldom_awake"]

SLACK = 30_000_000
"""Nanoseconds: a group that ends waits for a look of its thread, so it is no more."""

_SET, _GET = 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK of Linux
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


@contextlib.contextmanager
def seldom_awake() -> Iterator[None]:
    """Let waits of the threads that start meanwhile, and of theirs, end up to SLACK later where only time ends them.

    What arrives at a socket wakes them at once, as ever. The calling thread waits as before afterwards.
    """
    if _prctl is None:
        yield
        return
    before = _prctl(_GET, 0, 0, 0, 0)
    _prctl(_SET, ctypes.c_ulong(SLACK), 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_SET, ctypes.c_ulong(before), 0, 0, 0)
