"""`npu-kv ls`, `stat`, `verify`, `scrub` and `gc`: what is in a store, whether it is whole, and less of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from npu_kvconnector.errors import IntegrityError, StoreError
from npu_kvconnector.tiers.durable.envelope import record_bytes
from npu_kvconnector.tiers.durable.files import page_buffer
from npu_kvconnector.tiers.durable.reader import StoreReader
from npu_kvconnector.tiers.durable.segments import SegmentReader, segments_in
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.tiers.durable.index import Entry

__all__ = ["collect", "list_blocks", "open_writer", "scrub", "settle", "summarize", "verify"]

_UNLIMITED = 2**42  # bytes: commands leave the quota to the server


def list_blocks(folder: Path, *, realm: str = "", limit: int = 1000) -> dict[str, Any]:
    """Return the blocks of a store, in the order of their names; those of realms that begin with ``realm``.

    Raises:
        StoreError: there is no store, or its index cannot be read.
    """
    reader = StoreReader(folder)
    rows: list[dict[str, Any]] = []
    count = 0
    for name, entry in reader.index.entries():
        if not entry.realm.hex().startswith(realm):
            continue
        count += 1
        if len(rows) < limit:
            rows.append(_row(name, entry))
    reader.close()
    return {"blocks": rows, "count": count}


def summarize(folder: Path) -> dict[str, Any]:
    """Return counts and bytes of a store, by realm, and what was given up.

    Raises:
        StoreError: there is no store, or its index cannot be read.
    """
    reader = StoreReader(folder)
    realms: dict[str, dict[str, Any]] = {
        realm.hex(): {"blocks": 0, "bytes": 0, "stands_for": about} for realm, about in reader.index.realms().items()
    }
    for _, entry in reader.index.entries():
        of = realms.setdefault(entry.realm.hex(), {"blocks": 0, "bytes": 0, "stands_for": None})
        of["blocks"] += 1
        of["bytes"] += record_bytes(entry.place.size)
    sizes = segments_in(folder / "segments")
    index = sum(path.stat().st_size for path in reader.index.folder.iterdir())
    aside = sum(path.stat().st_size for path in (folder / "quarantine").rglob("*") if path.is_file())
    report = {
        "format": 1,
        "blocks": sum(of["blocks"] for of in realms.values()),
        "segments": len(sizes),
        "bytes": {"segments": sum(sizes.values()), "index": index, "set_aside": aside},
        "realms": realms,
        "given_up": [{"segment": number, "offset": at, **about} for number, at, about in reader.index.marks()],
        "past_the_page_cache": reader.is_direct,
    }
    reader.close()
    return report


def verify(folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Read every block and compare it with its envelope; nothing is changed, and a server may run.

    Raises:
        StoreError: there is no store, or its index cannot be read.
    """
    reader = StoreReader(folder)
    report = _read_all(reader, quiet=quiet)
    reader.close()
    return report


def scrub(folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Read every block, and give up those that are damaged, so that servers store them again.

    Raises:
        StoreError: there is no store, a server writes it, or what was given up could not be noted.
    """
    store = open_writer(folder)
    report = _read_all(store, quiet=quiet)
    for block in report["damaged"]:
        store.discard(bytes.fromhex(block["name"]), block["reason"])
    settle(store)
    store.close()
    return report | {"given_up": len(report["damaged"])}


def collect(
    folder: Path, *, quota: int | None = None, older_than: float | None = None, realm: str = ""
) -> dict[str, Any]:
    """Remove blocks by age (seconds) or realm, then the coldest segments down to a number of bytes.

    Raises:
        StoreError: there is no store, or a server writes it.
    """
    store = open_writer(folder)
    removed = 0
    if older_than is not None or realm:
        before = time.time() - older_than if older_than is not None else float("inf")
        for each in {entry.realm for _, entry in store.index.entries()}:
            if each.hex().startswith(realm):
                removed += store.forget_realm(each, before)
    given_back = store.shrink(store.bytes_on_disk() if quota is None else quota)
    report = {"removed": removed + store.evicted, "bytes_given_back": given_back, "bytes": store.bytes_on_disk()}
    store.close()
    return report


def open_writer(folder: Path, *, quota: int = _UNLIMITED, block_bytes: int = 2**20) -> DurableStore:
    """Open an existing store for writing.

    Raises:
        StoreError: there is no store, or a server writes it.
    """
    StoreReader(folder).close()  # says so where there is none, rather than making one
    return DurableStore(folder, quota=quota, block_bytes=block_bytes)


def settle(store: DurableStore) -> None:
    """Make all durable, which closing a store tries alone.

    Raises:
        StoreError: that failed, now or before.
    """
    store.commit()
    if store.lost:
        msg = f"{store.lost} blocks could not be made durable in {store.folder}: see the system's log for its disk"
        raise StoreError(msg)


def _read_all(reader: StoreReader, *, quiet: bool) -> dict[str, Any]:
    """Return what was read and what of it is damaged, segment after segment."""
    entries = sorted(reader.index.entries(), key=lambda pair: pair[1].place)
    damaged: list[dict[str, Any]] = []
    done, began = 0, time.monotonic()
    total = sum(record_bytes(entry.place.size) for _, entry in entries)
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None) as bar:
        for name, entry in entries:
            length = record_bytes(entry.place.size)
            try:
                with SegmentReader(reader.folder / "segments", entry.place.segment, direct=reader.is_direct) as segment:
                    header, _ = segment.read(entry.place, page_buffer(length))
                if (header.name, header.realm) != (name, entry.realm):
                    msg = "the record is another block's"
                    raise IntegrityError(msg)
            except FileNotFoundError:
                if reader.index.get(name) is None:  # a server has dropped it meanwhile
                    continue
                damaged.append({**_row(name, entry), "reason": "its segment is gone"})
            except (IntegrityError, OSError) as error:
                damaged.append({**_row(name, entry), "reason": str(error)})
            done += length
            bar.update(length)
    seconds = time.monotonic() - began
    return {"blocks": len(entries), "bytes": done, "seconds": round(seconds, 3), "damaged": damaged}


def _row(name: bytes, entry: Entry) -> dict[str, Any]:
    return {
        "name": name.hex(),
        "realm": entry.realm.hex(),
        "bytes": entry.block_bytes,
        "encrypted": entry.codec == 1,
        "stored_at": round(entry.stored_at, 3),
        "segment": f"{entry.place.segment:016x}",
        "offset": entry.place.offset,
    }
