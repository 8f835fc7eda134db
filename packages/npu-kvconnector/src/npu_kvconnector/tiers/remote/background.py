"""A thread with an event loop, which a scheduler hands work to without waiting for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from npu_kvconnector.tiers.priority import step_back

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

__all__ = ["BackgroundLoop", "loop_for_bulk"]

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines in a daemon thread of its own."""

    def __init__(self, name: str, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self._loop = new_loop()
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(4, name, step_back))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        step_back()
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; call from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what still runs, do ``last`` and end the thread; safe to call twice."""
        if self._loop.is_closed():
            last.close()
            return
        self.submit(_cancel_all()).result()
        self.submit(last).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def loop_for_bulk() -> asyncio.AbstractEventLoop:
    """Return an event loop that sends many bytes without copying them, where there is one.

    It is uvloop's, which servers of vLLM bring; what asyncio's own does to send a block takes twice as long.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
