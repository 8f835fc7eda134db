"""Stops processes so that they have stopped: a busy machine delivers SIGSTOP when a thread of theirs next gets a core."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.support.server import until

__all__ = ["stop"]


def stop(process: int) -> None:
    """Send SIGSTOP to a process and return when none of its threads runs any more."""
    os.kill(process, signal.SIGSTOP)
    assert until(lambda: all(state == "T" for state in _states(process))), f"process {process} does not stop"


def _states(process: int) -> list[str]:
    """Return the letter of each thread's state, of proc(5)."""
    states = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return states
