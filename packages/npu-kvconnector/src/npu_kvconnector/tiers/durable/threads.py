"""DaemonPool: threads for calls to a disk, which may never come back from one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DaemonPool"]

logger = logging.getLogger("vllm.npu_kvconnector")


class DaemonPool:
    """Does calls in the order of their submission; a process can end while one of them hangs.

    Python's own executors are waited for when the interpreter ends, for however long that takes.
    """

    def __init__(self, number: int, name: str, begin: Callable[[], None]) -> None:
        """Start the threads, each of which calls ``begin`` first."""
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None]
        self._calls = queue.SimpleQueue()
        self._begin = begin
        self._is_shut = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        """Let a thread do this call.

        Raises:
            RuntimeError: the pool was shut down.
        """
        if self._is_shut:
            msg = "the pool was shut down"
            raise RuntimeError(msg)
        self._calls.put((call, arguments, more))

    def shutdown(self, until: float) -> bool:
        """Let the threads end after all calls so far; return whether they did by then, in ``time.monotonic()``."""
        if not self._is_shut:
            self._is_shut = True
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        self._begin()
        while (todo := self._calls.get()) is not None:
            call, arguments, more = todo
            try:
                call(*arguments, **more)
            except Exception:  # what is called reports its own failures
                logger.exception("A call of the durable tier failed")
            del todo, call, arguments, more  # or the last one's would live on, and with them a view of the host tier
