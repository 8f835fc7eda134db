"""PackWriter: collects records until a pack is full, or a moment has gone by, and writes them as one object."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from npu_kvconnector.errors import StoreError
from npu_kvconnector.tiers.remote.pack import MOST_RECORDS, join

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from npu_kvconnector.tiers.remote.pack import Place
    from npu_kvconnector.tiers.remote.store import Record

__all__ = ["LINGER", "PackWriter"]

LINGER = 0.05
"""Seconds that a record waits for others at most; less than any deadline, so that its block is still there."""


class PackWriter:
    """Packs in one event loop; many may be on their way, one is being filled."""

    def __init__(self, pack_bytes: int, write: Callable[[bytes, list[Place]], Awaitable[None]]) -> None:
        self._pack_bytes = pack_bytes
        self._write = write
        self._records: list[Record] = []
        self._bytes = 0
        self._written: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    async def add(self, record: Record) -> None:
        """Put a record into a pack, and return when that is written.

        Raises:
            StoreError: the pack could not be written, or the writer was closed.
        """
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            self._timer = loop.call_later(LINGER, self._flush)
        written = self._written
        self._records.append(record)
        self._bytes += len(record.header) + memoryview(record.payload).nbytes
        if self._bytes >= self._pack_bytes or len(self._records) == MOST_RECORDS:
            self._flush()
        await asyncio.shield(written)

    def close(self) -> None:
        """Give up what is not written."""
        for task in self._writing:
            task.cancel()
        if self._written is not None and self._timer is not None:
            self._timer.cancel()
            _settle(self._written, StoreError("the store was closed"))
            self._records, self._bytes, self._written, self._timer = [], 0, None, None

    def _flush(self) -> None:
        """Begin to write the pack; the blocks are copied here, so their memory may be used again once this returns."""
        if self._written is None or self._timer is None:
            return
        self._timer.cancel()
        content, places = join(self._records)
        task = asyncio.ensure_future(self._finish(content, places, self._written))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        self._records, self._bytes, self._written, self._timer = [], 0, None, None

    async def _finish(self, content: bytes, places: list[Place], written: asyncio.Future[None]) -> None:
        try:
            await self._write(content, places)
        except asyncio.CancelledError:
            _settle(written, StoreError("the store was closed"))
            raise
        except Exception as error:  # noqa: BLE001 - for those who wait
            _settle(written, error)
        else:
            _settle(written, None)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more
