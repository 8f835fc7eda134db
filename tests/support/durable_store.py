"""A durable store of blocks of 20 kB that tell their number, for the tests of one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.tiers.durable.reader import StoreReader

__all__ = ["QUOTA", "REALM", "SIZE", "block", "held", "name", "open_store", "put"]

REALM = b"a realm of blocks"[:16]
SIZE = 20_000
QUOTA = 12 * 2**20


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def open_store(folder: Path, **options: object) -> DurableStore:
    return DurableStore(folder, **{"quota": QUOTA, "block_bytes": SIZE, "commit_seconds": 0} | options)  # type: ignore[arg-type]


def put(store: DurableStore, *numbers: int) -> None:
    for number in numbers:
        store.put(name(number), REALM, memoryview(block(number)))


def held(store: StoreReader, numbers: range) -> list[int]:
    """Return the numbers of the blocks there are; each must be what was stored."""
    found = []
    for number in numbers:
        read = store.read(name(number))
        if read is not None:
            assert bytes(read.payload) == block(number)
            found.append(number)
    return found
