"""Owns the end of a process: the threads of torch's autograd get a moment to let go of what they hold of Python.

Why: such a thread drops Python objects when a backward of the device is done. One that asks for the GIL while the
interpreter ends kills the process (SIGABRT; pull request 186583 of torch is about that).
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_MOMENT = 0.01  # seconds; a thread that is woken with the GIL free needs a tenth of a millisecond


def register() -> None:
    """Wait at the end of a process in which a backward ran, after what others registered since."""
    atexit.register(_let_autograd_finish)


def _let_autograd_finish() -> None:
    if any(_name(task).startswith("pt_autograd") for task in Path("/proc/self/task").iterdir()):
        time.sleep(_MOMENT)


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended since
        return ""
