"""Which threads go first where cores are short: those of the step, then those that carry blocks between tiers."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["step_back"]

_NICER = 10  # about a tenth of a core that others want; all of one that nobody does


def step_back() -> None:
    """Let the calling thread go behind the engine's own; where the system has no such thing, it stays."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
