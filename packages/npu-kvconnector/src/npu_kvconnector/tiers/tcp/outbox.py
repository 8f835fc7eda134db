"""Outbox: sealed blocks in this server's memory that peers may fetch, by transfer; for one event loop, without locks.

A transfer is open while its request runs: blocks that are not there yet may still come, and who asks for them waits.
Afterwards it is held until it is fetched, or nobody has asked for it for a while.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["Outbox"]


class Outbox:
    """Blocks by transfer and name, at most so many bytes of them."""

    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            most_bytes: of all records together.
            seconds: for which a transfer is held that nobody asks for.
            clock: seconds, for tests.
        """
        self.used_bytes = 0
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._transfers: dict[str, _Transfer] = {}

    def open(self, transfer: str) -> None:
        """Begin a transfer, of a request that has come."""
        entry = self._transfers.setdefault(transfer, _Transfer())
        entry.is_open = True

    def close(self, transfer: str) -> None:
        """Take note that the request has ended: nothing comes any more but what is being put."""
        entry = self._transfers.get(transfer)
        if entry is not None:
            entry.is_open = False
            self._touch(entry)

    def begin(self, transfer: str) -> None:
        """Take note that blocks are about to be put, also where the request ends meanwhile."""
        self._transfers.setdefault(transfer, _Transfer()).coming += 1

    def end(self, transfer: str) -> None:
        """Take note that they were, or not."""
        entry = self._transfers.get(transfer)
        if entry is not None:
            entry.coming -= 1
            self._touch(entry)

    def reserve(self, size: int) -> bool:
        """Return whether there is room for so many bytes, and take it."""
        if self.used_bytes + size > self._most_bytes:
            return False
        self.used_bytes += size
        return True

    def put(self, transfer: str, name: bytes, record: Buffer) -> None:
        """Hold a record in the room reserved for it; what nobody wants any more gives the room back."""
        entry = self._transfers.get(transfer)
        if entry is None or name in entry.records:
            self.used_bytes -= memoryview(record).nbytes
            return
        entry.records[name] = record
        self._touch(entry)

    def get(self, transfer: str, names: Iterable[bytes]) -> list[Buffer | None]:
        """Return the records of these names; None for those that are not there."""
        entry = self._transfers.get(transfer)
        if entry is None:
            return [None for _ in names]
        self._touch(entry)
        return [entry.records.get(name) for name in names]

    async def find(self, transfer: str, names: Sequence[bytes], seconds: float) -> list[bool]:
        """Say for each name whether its record is there; wait for those that may still come, for so long."""
        entry = self._transfers.get(transfer)
        if entry is None:
            return [False] * len(names)
        self._touch(entry)
        try:
            async with asyncio.timeout(seconds):
                while entry.is_coming and not all(name in entry.records for name in names):
                    await entry.changed.wait()
        except TimeoutError:
            pass  # the answer is what there is
        return [name in entry.records for name in names]

    def keep(self, transfers: Iterable[str]) -> None:
        """Hold transfers for longer."""
        for transfer in transfers:
            entry = self._transfers.get(transfer)
            if entry is not None:
                self._touch(entry)

    def drop(self, transfers: Iterable[str]) -> int:
        """Forget transfers; return how many records that were."""
        number = 0
        for transfer in transfers:
            entry = self._transfers.pop(transfer, None)
            if entry is not None:
                number += len(entry.records)
                self.used_bytes -= sum(memoryview(record).nbytes for record in entry.records.values())
                entry.is_open, entry.coming = False, 0
                entry.wake()
        return number

    def expire(self) -> int:
        """Forget the transfers that nobody has asked for in time; return how many records that were."""
        since = self._clock() - self._seconds
        return self.drop(
            [name for name, entry in self._transfers.items() if not entry.is_coming and entry.used < since]
        )

    def _touch(self, entry: _Transfer) -> None:
        entry.used = self._clock()
        entry.wake()


class _Transfer:
    """The records of a transfer, and whether more of them come."""

    __slots__ = ("changed", "coming", "is_open", "records", "used")

    def __init__(self) -> None:
        self.is_open = False
        self.coming = 0
        self.records: dict[bytes, Buffer] = {}
        self.used = 0.0
        self.changed = asyncio.Event()

    @property
    def is_coming(self) -> bool:
        return self.is_open or self.coming > 0

    def wake(self) -> None:
        """Let those who wait look again."""
        self.changed.set()
        self.changed = asyncio.Event()
