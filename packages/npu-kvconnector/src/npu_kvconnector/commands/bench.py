"""`npu-kv bench`: how fast a store is here, against the limits of memory and disk measured in the same run."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from tqdm import tqdm

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.durable.envelope import record_bytes
from npu_kvconnector.tiers.durable.files import open_file, page_buffer, read_at, supports_direct, write_at
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bench"]

_REALM = b"npu-kv bench    "


def bench(
    folder: Path, *, total: int = 2**28, sizes: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22), quiet: bool = False
) -> dict[str, Any]:
    """Measure in a folder of its own below ``folder``, which is removed again; ``total`` bytes a measurement.

    Raises:
        OptionError: the folder cannot be used.
    """
    place = folder / f"npu-kv-bench-{uuid.uuid4().hex}"
    try:
        place.mkdir(mode=0o700)
    except OSError as error:
        msg = f"{folder} cannot be used: {error.strerror}; name a folder on the disk to measure"
        raise OptionError(msg) from error
    try:
        direct = supports_direct(place)
        rows = [
            _measure(place, size, max(total // size, 1), direct=direct) for size in tqdm(sizes, disable=quiet or None)
        ]
    except OSError as error:
        msg = f"{folder} cannot be measured: {error.strerror or error}; lower --total, or name another disk"
        raise OptionError(msg) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {"past_the_page_cache": direct, "memory_copy": _memory(total), "checksum": _checksum(), "sizes": rows}


def _measure(place: Path, size: int, count: int, *, direct: bool) -> dict[str, Any]:
    """Return GB/s of the disk and of a store, with blocks of ``size`` bytes."""
    block = page_buffer(size)
    block[:] = np.random.default_rng(0).bytes(size)
    row: dict[str, Any] = {"block_bytes": size, "blocks": count}
    row["disk_write"], row["disk_read"] = _disk(place / "raw", block, count, direct=direct)
    quota = 4 * count * record_bytes(size) + 64 * 2**20
    store = DurableStore(place / "store", quota=quota, block_bytes=size, commit_seconds=0)
    names = [number.to_bytes(32, "big") for number in range(count)]
    began = time.perf_counter()
    for name in names:
        store.put(name, _REALM, block)
    store.commit()
    row["store_write"] = size * count / (time.perf_counter() - began) / 1e9
    buffer = page_buffer(record_bytes(size))
    began = time.perf_counter()
    found = sum(store.read(name, buffer) is not None for name in names)
    row["store_read"] = size * count / (time.perf_counter() - began) / 1e9
    assert found == count, "a block was lost while it was measured"
    began = time.perf_counter()
    for name in names:
        store.find(name)
    row["lookup_microseconds"] = (time.perf_counter() - began) / count * 1e6
    store.close()
    shutil.rmtree(place / "store")
    row["write_share"] = row["store_write"] / row["disk_write"]
    row["read_share"] = row["store_read"] / row["disk_read"]
    return row


def _disk(path: Path, block: memoryview, count: int, *, direct: bool) -> tuple[float, float]:
    """Return GB/s of writing blocks and fdatasync, and of reading them."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct)
    try:
        os.posix_fallocate(descriptor, 0, len(block) * count)
        os.fsync(descriptor)
        began = time.perf_counter()
        for number in range(count):
            write_at(descriptor, [block], number * len(block))
        os.fdatasync(descriptor)
        middle = time.perf_counter()
        for number in range(count):
            read_at(descriptor, block, number * len(block))
        end = time.perf_counter()
    finally:
        os.close(descriptor)
        path.unlink()
    return tuple(len(block) * count / seconds / 1e9 for seconds in (middle - began, end - middle))  # type: ignore[return-value]


def _memory(total: int) -> float:
    """Return GB/s of a copy in memory."""
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return total / (time.perf_counter() - began) / 1e9


def _checksum() -> float:
    """Return GB/s of XXH3-128."""
    data = bytes(2**26)
    began = time.perf_counter()
    xxhash.xxh3_128_digest(data)
    return len(data) / (time.perf_counter() - began) / 1e9
