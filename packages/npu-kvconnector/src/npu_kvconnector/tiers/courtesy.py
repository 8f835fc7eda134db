"""Courtesy: how long a thread that brings blocks in rests, where running requests want the cores that it works on.

Note [Where cores are short]. Bytes that come over a network cost the host's processors one or two seconds a GB. On few
cores that comes out of the steps of running requests, which wait for their slowest thread. So while hardly a core is
idle, what the thread itself takes not counted, it works for a small share of the time and rests in between. But a load
must end: it never rests so long that it falls behind an even pace that ends in good time.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Courtesy"]

_SHARE = 0.06
"""Of the time, that the thread works where cores are short."""
_IDLE_CORES = 0.5
"""With fewer than these, cores are short."""
_WINDOW_SECONDS = 0.1
_OLD_SECONDS = 2.0
"""What was seen so long ago says nothing of now."""
_MOST_OWED = 0.5


def _busy_seconds() -> float:
    """Return for how long the host's processors have worked, together."""
    times = psutil.cpu_times()
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))


class Courtesy:
    """Of one thread, which calls all methods."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        busy: Callable[[], float] = _busy_seconds,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        """Begin; the arguments are for tests: the time, what the thread and what all processors worked, and so on."""
        self.is_short = False
        self._clock, self._worked, self._busy, self._cores = clock, worked, busy, cores
        self._seen: tuple[float, float, float] | None = None
        self._counted: float | None = None
        self._owed = 0.0

    def look(self) -> None:
        """See whether cores are short, now and then."""
        now = self._clock()
        if self._seen is not None and now - self._seen[0] < _WINDOW_SECONDS:
            return
        seen, self._seen = self._seen, (now, self._busy(), self._worked())
        self.is_short = False
        if seen is not None and now - seen[0] < _OLD_SECONDS:
            _, busy, worked = (new - old for new, old in zip(self._seen, seen, strict=True))
            self.is_short = busy - worked > (self._cores - _IDLE_CORES) * (now - seen[0])

    def rest(self, ahead: float) -> float:
        """Return for how long to rest after a piece of work.

        Args:
            ahead: seconds by which the work is ahead of the pace that it must keep.
        """
        self.look()
        worked, before = self._worked(), self._counted
        self._counted = worked
        if not self.is_short or before is None:
            self._owed = 0.0
            return 0.0
        self._owed = min(self._owed + (worked - before) * (1 / _SHARE - 1), _MOST_OWED)
        seconds = max(0.0, min(self._owed, ahead))
        self._owed -= seconds
        return seconds
