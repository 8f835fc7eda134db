"""What a start does with the store it finds: prove the index, adopt the tail, clear away what a crash left.

Only the tail is read, that is what was appended after the last transaction of the index. Where the index itself cannot
be read, or is not what that transaction left, it is set aside, and made again from the envelopes, of which then all are
read, without their payloads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from typing import TYPE_CHECKING

from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.durable import probe
from npu_kvconnector.tiers.durable.envelope import record_bytes
from npu_kvconnector.tiers.durable.files import PAGE, make_folder, open_file, sync_folder
from npu_kvconnector.tiers.durable.index import Batch, Entry, Index
from npu_kvconnector.tiers.durable.segments import Place, SegmentReader, segment_path, segments_in

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.tiers.durable.envelope import Header

__all__ = ["Recovered", "newest_index", "recover", "set_aside"]

_BUILDING = ".index-building"
_TRIES = 3
"""To read a segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recovered:
    """A store that is in order."""

    index: Index
    segments: dict[int, int]
    """Bytes of each segment file."""
    tick: int
    next_segment: int
    adopted: int
    """Blocks that the index did not name yet."""
    was_rebuilt: bool


def newest_index(folder: Path) -> Path | None:
    """Return the folder of the index; a new one is made at each start, and has the highest number."""
    found = [path for path in folder.glob("index-*") if path.name[6:].isdigit() and path.is_dir()]
    return max(found, key=lambda path: int(path.name[6:]), default=None)


def set_aside(path: Path, quarantine: Path) -> None:
    """Move what cannot be used out of the way, for somebody to look at; it goes when room is needed."""
    make_folder(quarantine)
    path.rename(quarantine / f"{path.name}-{time.time_ns()}")


def recover(folder: Path, store_id: bytes, *, map_size: int) -> Recovered:
    """Bring a store in order; the caller holds its lock.

    Raises:
        OSError: the folder cannot be read or written.
        lmdb.Error: the index cannot be written.
    """
    index, was_rebuilt = _prove_index(folder, map_size)
    try:
        meta = index.meta()
        tick, next_segment = meta.get("tick", 1), meta.get("next_segment", 1)
        durable = index.segments()
        place = folder / "segments"
        batch = Batch(dropped=[number for number in durable if not segment_path(place, number).is_file()])
        for number in sorted(segments_in(place)):
            if number not in durable and number < next_segment and not was_rebuilt:
                segment_path(place, number).unlink()  # dropped by a transaction, but not yet removed
                continue
            try:
                found, end = _read(place, number, store_id, durable.get(number, PAGE), payloads=not was_rebuilt)
            except (IntegrityError, OSError):
                set_aside(segment_path(place, number), folder / "quarantine")
                batch.dropped.append(number)
                continue
            for header in found:
                ticks = tick + len(batch.puts)
                batch.puts[header.name] = _entry(header, ticks)
            next_segment = max(next_segment, number + 1)
            _give_back(segment_path(place, number), end, batch, number)
        tick += len(batch.puts)
        batch.meta = {"tick": tick, "next_segment": next_segment}
        index.commit(batch)
        sync_folder(place)
        return Recovered(index, segments_in(place), tick, next_segment, len(batch.puts), was_rebuilt)
    except BaseException:
        index.close()
        raise


def _prove_index(folder: Path, map_size: int) -> tuple[Index, bool]:
    """Return a new index with what the old one has, and whether that was not whole."""
    building = folder / _BUILDING
    shutil.rmtree(building, ignore_errors=True)
    old = newest_index(folder)
    is_first = old is None and not segments_in(folder / "segments")
    is_proven = old is not None and probe.rewrite(old, building, map_size)
    if old is not None and not is_proven:
        set_aside(old, folder / "quarantine")
    if not is_proven:
        shutil.rmtree(building, ignore_errors=True)
        Index(building, map_size=map_size).close()
    new = folder / f"index-{(int(old.name[6:]) if old else 0) + 1:08d}"
    sync_folder(building)
    building.rename(new)
    sync_folder(folder)
    for path in folder.glob("index-*"):
        if path != new and path.name[6:].isdigit():
            shutil.rmtree(path, ignore_errors=True)
    return Index(new, map_size=map_size), not is_proven and not is_first


def _read(folder: Path, number: int, store_id: bytes, start: int, *, payloads: bool) -> tuple[list[Header], int]:
    """Return the records of a segment behind ``start``, and where the last one ends.

    A disk that fails for a moment must not cost the blocks behind, so it is asked again.

    Raises:
        IntegrityError: the segment is damaged, or another store's.
        OSError: it cannot be read.
    """
    for left in reversed(range(_TRIES)):
        try:
            with SegmentReader(folder, number) as segment:
                segment.check(store_id)
                found = list(segment.scan(start, segment.file_bytes(), payloads=payloads))
        except OSError:
            if not left:
                raise
        else:
            break
    end = found[-1].offset + record_bytes(found[-1].size) if found else start
    return found, end


def _entry(header: Header, tick: int) -> Entry:
    place = Place(header.segment, header.offset, header.size)
    return Entry(place, header.block_bytes, header.codec, header.realm, header.stored_at, tick, tick)


def _give_back(path: Path, end: int, batch: Batch, number: int) -> None:
    """Give back the space behind the last record; a segment without records goes."""
    if end <= PAGE:
        path.unlink()
        batch.dropped.append(number)
        return
    batch.segments[number] = end
    if path.stat().st_size > end:
        descriptor = open_file(path, os.O_RDWR)
        with contextlib.closing(os.fdopen(descriptor, "rb+", buffering=0)) as file:
            file.truncate(end)
            os.fdatasync(file.fileno())
