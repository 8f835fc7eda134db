"""Owns what others take of this process's processors, by which a measurement of times knows that it was disturbed."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["OtherWork"]

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_IDLE = (3, 4)  # places of idle and iowait among the times of a processor
_GUESTS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests' times, which follow, are in the user's
SHARE = 0.05
"""Of the processors: what always runs on a machine."""
ROUNDING = 0.015  # seconds a processor: the kernel counts in ticks


class OtherWork:
    """What others have done since this was made, on the processors that this process may use.

    Source: ``/proc/stat`` of proc(5), with what the hypervisor took ("steal"), less this process's own time. Where
    there is no such file nobody else is seen.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self._processors = os.sched_getaffinity(0)
        self._begun, self._before = time.monotonic(), self._now()

    @property
    def seconds(self) -> float:
        """Of processors, that others have taken."""
        return max(0.0, self._now() - self._before)

    def disturbs(self, threads: int) -> bool:
        """Return whether so many threads of this process did not each have a processor of their own."""
        number, passed = len(self._processors), time.monotonic() - self._begun
        free = max(number - threads, 0) + SHARE * number
        return self.seconds > free * passed + ROUNDING * number

    def _now(self) -> float:
        return _busy_seconds(self._processors) - time.process_time()


def _busy_seconds(processors: set[int]) -> float:
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return 0.0
    ticks = 0
    for line in lines:
        name, _, times = line.partition(" ")
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in processors:
            counts = [int(count) for count in times.split()[:_GUESTS]]
            ticks += sum(count for place, count in enumerate(counts) if place not in _IDLE)
    return ticks / _TICKS
