"""Patience: how long a request waits for a tier to say what it has. No vLLM, no threads.

Note [Known to be quick]. A tier that has always answered within milliseconds and does not now will hardly answer in
half a second, for which all requests that ask it would wait, and often the engine with them. So a tier that is known to
be quick has ten times what the slowest of its last answers took, which others may take as long as is allowed.
"""

from __future__ import annotations

import collections

__all__ = ["Patience"]

_REMEMBERED, _FEWEST = 64, 16  # answers
_TIMES = 10.0
_LEAST = 0.1
"""Seconds: a disk or a network has a bad moment, now and then."""


class Patience:
    """With one tier; who waits tells how long it was."""

    def __init__(self, most: float, *, learns: bool = True) -> None:
        """Begin with the most seconds, which stay if it does not learn."""
        self.seconds = most
        self._most = most
        self._answers: collections.deque[float] | None = collections.deque(maxlen=_REMEMBERED) if learns else None

    def note(self, seconds: float) -> None:
        """Take note of an answer that somebody waited for so long."""
        if self._answers is None:
            return
        self._answers.append(seconds)
        if len(self._answers) >= _FEWEST:
            self.seconds = min(self._most, max(_LEAST, _TIMES * max(self._answers)))
