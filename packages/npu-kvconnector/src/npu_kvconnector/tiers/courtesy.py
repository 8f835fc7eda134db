"""Courtesy: how long a thread that carries blocks rests, where running requests want the cores that it works on.

Note [Where cores are short]. Bytes that go over a network cost the host's processors one or two seconds a GB. On few
cores that comes out of the steps of running requests, which wait for their slowest thread. So while hardly a core is
idle, what the thread itself takes not counted, it works for a small share of the time and rests in between. But work
must end: it never rests so long that it falls behind an even pace that ends in good time. And an engine that computes
nothing wants no cores, though it looks busy while it waits for blocks: :func:`note_step`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from npu_kvconnector.config import GuardConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["LOADING", "STORING", "UNHURRIED", "Courtesy", "note_step", "shortest"]

LOADING, STORING = 0.06, 0.02
"""Of the time, that the thread works where cores are short: for a request that waits, and where nobody does."""
UNHURRIED = 0.5
"""Of the time that a load or a store has, for which it may go slowly where cores are short."""
_IDLE_CORES = 1.0
"""With fewer than these, cores are short: a thread may take as much."""
_WINDOW_SECONDS = 0.1
_OLD_SECONDS = 2.0
"""What was seen so long ago says nothing of now."""
_MOST_WORK = 0.03
"""Seconds of work that are made good by rest; what one piece took beyond that was not its own."""


class _Engine:
    """That of this process, as far as is known."""

    is_idle = False


def note_step(*, is_idle: bool) -> None:
    """Take note of whether the step that the engine of this process begins computes nothing."""
    _Engine.is_idle = is_idle


def _is_idle() -> bool:
    return _Engine.is_idle


def _busy_seconds() -> float:
    """Return for how long the host's processors have worked, together."""
    times = psutil.cpu_times()
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))


class Courtesy:
    """Of one thread, which calls all methods."""

    def __init__(
        self,
        share: float = LOADING,
        *,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        busy: Callable[[], float] = _busy_seconds,
        is_idle: Callable[[], bool] = _is_idle,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        """Begin.

        Args:
            share: of the time, that the thread works where cores are short.
            clock: the time, for tests, as what follows.
            worked: what the thread worked.
            busy: what all processors worked.
            is_idle: whether the engine computes nothing.
            cores: how many there are.
        """
        self.is_short = False
        self._share = share
        self._clock, self._worked, self._busy, self._is_idle, self._cores = clock, worked, busy, is_idle, cores
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

    def still_rests(self) -> bool:
        """Return whether there is still a reason to, for a rest that is long; cheap enough to ask now and then."""
        self.look()
        return self.is_short and not self._is_idle()

    def rest(self, ahead: float) -> float:
        """Return for how long to rest after a piece of work; who rests for long asks :meth:`still_rests` meanwhile.

        Args:
            ahead: seconds by which the work is ahead of the pace that it must keep.
        """
        self.look()
        worked, before = self._worked(), self._counted
        self._counted = worked
        if not self.is_short or before is None or self._is_idle():
            self._owed = 0.0
            return 0.0
        self._owed = min(self._owed + (worked - before) * (1 / self._share - 1), _MOST_WORK / self._share)
        seconds = max(0.0, min(self._owed, ahead))
        self._owed -= seconds
        return seconds


def shortest(extra_config: Mapping[str, Any], kind: str, name: str) -> float:
    """Return for how long the guard waits for a load or a store of this kind of tier; of several the shortest."""
    tiers = [tier for tier in extra_config.get("secondary_tiers", []) if tier.get("type") == kind]
    guards = [GuardConfig.parse({**extra_config.get("guard", {}), **tier.get("guard", {})}) for tier in tiers]
    return min((getattr(guard, name) for guard in guards), default=getattr(GuardConfig(), name))
