"""Whether a store is worth asking: after failures in a row it is left alone for a while, longer each time.

While it is left alone every block is a miss at once, so that a dead or stalled store costs requests nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Health"]

_FAILURES = 3
_SHORTEST, _LONGEST = 1.0, 60.0


class Health:
    """Counts failures in a row; used from several threads, each of whose steps is one assignment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = _SHORTEST
        self._until = 0.0

    def allows(self) -> bool:
        """Whether the store may be asked now; after a pause, one failure is enough for the next one."""
        return self._clock() >= self._until

    def succeeded(self) -> None:
        """Note an answer in time."""
        self._failures, self._pause = 0, _SHORTEST

    def failed(self) -> bool:
        """Note an error or a deadline missed; say whether a pause begins with it."""
        if not self.allows():
            return False
        self._failures += 1
        if self._failures < _FAILURES:
            return False
        self._until = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LONGEST)
        return True
