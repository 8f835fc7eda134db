"""CircuitBreaker: whether one kind of work is still given to a tier that fails. No vLLM, no threads.

The pattern is M. Nygard's ("Release It!"): closed, work goes through; after several failures in a row open, nothing
does; after a while half-open, one piece of work tries, and decides between closed and open for twice as long.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_kvconnector.config import GuardConfig

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(enum.IntEnum):
    """The state; its number is what the metrics show."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Counts failures in a row; tell it what became of each piece of work that it allowed.

    Who does not call ``begin`` lets all work try at once when the time is up; the first failure opens it again.
    """

    def __init__(self, config: GuardConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Start closed."""
        self.state = BreakerState.CLOSED
        self.times_opened = 0
        self._config = config
        self._clock = clock
        self.failures = 0
        self._is_trying = False
        self._pause = config.open_seconds
        self._open_until = 0.0

    def allows(self) -> bool:
        """Return whether work may be given to the tier now; an open breaker becomes half-open when its time is up."""
        if self.state is BreakerState.OPEN and self._clock() >= self._open_until:
            self.state = BreakerState.HALF_OPEN
            self._is_trying = False
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._is_trying)

    def begin(self) -> None:
        """Take note of work that was given to the tier and whose end will be told: while half-open, it is the try."""
        self._is_trying = self.state is BreakerState.HALF_OPEN

    def succeed(self) -> None:
        """Take note of work that ended well. What was begun before the breaker opened does not close it."""
        if self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._is_trying = False
        self._pause = self._config.open_seconds

    def dismiss(self) -> None:
        """Take note of work that ended without a sign of either; while half-open, another piece of work may try."""
        self._is_trying = False

    def fail(self) -> bool:
        """Take note of a failure: of work, or of a call that raised or took too long; return whether it opens."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause = min(2 * self._pause, self._config.max_open_seconds)
        elif self.state is BreakerState.OPEN or self.failures < self._config.failures:
            return False
        self._open()
        return True

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self.times_opened += 1
        self._is_trying = False
        self._open_until = self._clock() + self._pause
