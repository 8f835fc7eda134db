"""Hedged reads: one that takes longer than most is sent a second time, and the first answer counts.

Method: Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013: wait for the 95th percentile, so that about one read in
20 is sent twice. A budget keeps it at that when all reads become slow, as on an overloaded store.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Hedge"]

T = TypeVar("T")

_SHARE = 0.05
_MOST_SAVED = 5.0
_WINDOW = 200
_FEWEST = 20
_SHORTEST = 0.005


class Hedge:
    """Reads of one store, in one event loop."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._budget = 1.0
        self.sent = 0
        """Reads that were sent a second time."""

    async def read(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the answer of ``request``, called once or twice; an error counts as an answer when none is left."""
        began = time.monotonic()
        self._budget = min(self._budget + _SHARE, _MOST_SAVED)
        tasks = {asyncio.create_task(request())}
        try:
            await asyncio.wait(tasks, timeout=self._patience())
            if not any(task.done() for task in tasks) and self._budget >= 1.0:
                self._budget -= 1.0
                self.sent += 1
                tasks.add(asyncio.create_task(request()))
            answer = await _first_answer(tasks)
        finally:
            await _cancel(tasks)
        self._seconds.append(time.monotonic() - began)
        return answer

    def _patience(self) -> float | None:
        """Return the seconds after which a read is slow, or None for never."""
        if not self._enabled or len(self._seconds) < _FEWEST:
            return None
        return max(sorted(self._seconds)[int(0.95 * len(self._seconds))], _SHORTEST)


async def _first_answer(tasks: set[asyncio.Task[T]]) -> T:
    waiting = set(tasks)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        good = [task for task in done if task.exception() is None]
        if good or not waiting:
            return (good or list(done))[0].result()


async def _cancel(tasks: set[asyncio.Task[T]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
