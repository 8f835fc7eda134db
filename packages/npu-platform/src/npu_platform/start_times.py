"""Owns the account of a worker's start: how long each part took, for the log, and for who wants it shorter."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["StartTimes", "process_age"]

_START_TIME = 19  # its place in /proc/self/stat, counted from behind the process's name


def process_age() -> float:
    """Return the seconds since this process began; of a fork, since it was forked."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


class StartTimes:
    """The parts of a start in their order, the first of which is all that came before: imports and configuration."""

    def __init__(self) -> None:
        """Begin the account now."""
        self._age = process_age()
        self._parts = {"imports": self._age}
        self._began = time.monotonic()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as that of the part; parts of one name add up."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - begin

    def text(self) -> str:
        """Return all parts, what none of them counted, and the time since the process began."""
        total = self._age + time.monotonic() - self._began
        parts = self._parts | {"other": total - sum(self._parts.values())}
        return f"{total:.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
