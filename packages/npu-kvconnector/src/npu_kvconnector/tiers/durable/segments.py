"""Segments: files that are filled once, record after record, and removed as a whole.

Page 0 says whose file it is (a *superblock*), the rest is taken from the filesystem when the file is made, so that
later writes need no more space. Numbers are never used again, so a file name never means two contents.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.durable import envelope
from npu_kvconnector.tiers.durable.files import (
    PAGE,
    is_aligned,
    open_file,
    page_buffer,
    read_at,
    round_up,
    sync_folder,
    write_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from typing_extensions import Buffer

    from npu_kvconnector.tiers.durable.envelope import Header

__all__ = ["Place", "SegmentReader", "SegmentWriter", "segment_path", "segments_in"]

_MAGIC = b"NPUKVSEG"
_SUPERBLOCK = struct.Struct("<8sIIQ16s")
_END = _SUPERBLOCK.size + 8


class Place(NamedTuple):
    """Where a record begins, and the bytes of its payload."""

    segment: int
    offset: int
    size: int


def segment_path(folder: Path, number: int) -> Path:
    """Return the name of a segment."""
    return folder / f"{number:016x}.seg"


def segments_in(folder: Path) -> dict[int, int]:
    """Return the bytes of each segment file by its number; other files are not ours and left alone."""
    found = {}
    for path in folder.glob("*.seg"):
        if len(path.stem) == 16 and set(path.stem) <= set("0123456789abcdef") and path.is_file():
            found[int(path.stem, 16)] = path.stat().st_size
    return found


class SegmentWriter:
    """The segment that blocks are appended to."""

    def __init__(self, folder: Path, number: int, store_id: bytes, *, size: int, direct: bool) -> None:
        """Make the file and take its space.

        Raises:
            OSError: there is no space, or the file cannot be made; nothing is left behind.
        """
        self.number = number
        self.size = size
        self.used = PAGE
        self._folder = folder
        self._direct = direct
        path = segment_path(folder, number)
        self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct)
        page = page_buffer(PAGE)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            fields = _SUPERBLOCK.pack(_MAGIC, 1, 0, number, store_id)
            page[:_END] = fields + xxhash.xxh3_64_digest(fields)
            write_at(self._descriptor, [page], 0)
            os.fsync(self._descriptor)
            sync_folder(folder)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise
        self._pages, self._scratch = page_buffer(PAGE), page_buffer(PAGE)

    @property
    def room(self) -> int:
        """Bytes that are left for records."""
        return self.size - self.used

    def has_room(self, size: int) -> bool:
        """Return whether a payload of ``size`` bytes fits."""
        return envelope.record_bytes(size) <= self.room

    def append(self, records: Sequence[tuple[Header, memoryview]]) -> list[Place]:
        """Write records at the end, in one call; their places are filled in here. They are not durable yet.

        A thread that waits for a core after each write waits once for all of them.

        Raises:
            OSError: of the system; the end stays where it was.
        """
        self._make_room([payload for _, payload in records])
        places, end, pages, free = [], self.used, self._pages, self._scratch
        buffers: list[Buffer] = []
        for header, payload in records:
            place = Place(self.number, end, len(payload))
            page, pages = pages[:PAGE], pages[PAGE:]
            envelope.pack(header._replace(segment=place.segment, offset=place.offset), payload, page)
            whole = round_up(place.size)
            if self._must_copy(payload):
                copy, free = free[:whole], free[whole:]
                copy[: place.size] = payload
                buffers += [page, copy]
            else:
                buffers += [page, payload]
                if whole > place.size:
                    buffers.append(bytes(whole - place.size))
            places.append(place)
            end += PAGE + whole
        write_at(self._descriptor, buffers, self.used)
        self.used = end
        return places

    def sync(self) -> None:
        """Make all records so far durable."""
        os.fdatasync(self._descriptor)

    def _must_copy(self, payload: memoryview) -> bool:
        return self._direct and not is_aligned(payload)

    def _make_room(self, payloads: Sequence[memoryview]) -> None:
        """Have memory for an envelope of each, and for those that do not lie as O_DIRECT needs it."""
        if len(self._pages) < PAGE * len(payloads):
            self._pages = page_buffer(PAGE * len(payloads))
        size = sum(round_up(len(payload)) for payload in payloads if self._must_copy(payload))
        if len(self._scratch) < size:
            self._scratch = page_buffer(size)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SegmentReader:
    """One segment, open for reading. What was removed meanwhile stays readable while it is open."""

    def __init__(self, folder: Path, number: int, *, direct: bool = False) -> None:
        """Open the file.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        self.number = number
        self._descriptor = open_file(segment_path(folder, number), os.O_RDONLY, direct=direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def file_bytes(self) -> int:
        """Return the size of the file."""
        return os.fstat(self._descriptor).st_size

    def check(self, store_id: bytes) -> None:
        """Look at the superblock.

        Raises:
            IntegrityError: it is damaged, or the file is another store's.
        """
        page = page_buffer(PAGE)
        read_at(self._descriptor, page, 0)
        expected = _SUPERBLOCK.pack(_MAGIC, 1, 0, self.number, store_id)
        if bytes(page[: len(expected)]) != expected or bytes(page[len(expected) : _END]) != xxhash.xxh3_64_digest(
            expected
        ):
            msg = f"segment {self.number:016x} has no superblock of this store"
            raise IntegrityError(msg)

    def read(self, place: Place, buffer: memoryview) -> tuple[Header, memoryview]:
        """Read a record into a buffer of whole pages; return what it says and a view of its payload.

        Raises:
            IntegrityError: it is damaged, cut short, or not the record of this place.
            OSError: of the system.
        """
        length = envelope.record_bytes(place.size)
        # A file system may give back less than whole pages at the end of a file that was cut.
        done = read_at(self._descriptor, buffer[:length], place.offset)
        if done < PAGE + place.size:
            msg = f"the segment ends {PAGE + place.size - done} bytes before the record does"
            raise IntegrityError(msg)
        header = envelope.verify(buffer[:PAGE], buffer[PAGE : PAGE + place.size])
        if (header.segment, header.offset) != (place.segment, place.offset):
            msg = f"the record belongs to segment {header.segment:016x}, offset {header.offset}"
            raise IntegrityError(msg)
        return header, buffer[PAGE : PAGE + place.size]

    def scan(self, start: int, end: int, *, payloads: bool) -> Iterator[Header]:
        """Yield the records from an offset on, up to the first that is not whole.

        Args:
            start: offset of the first record.
            end: bytes of the file.
            payloads: whether to read and verify the payloads too.

        Raises:
            OSError: it cannot be read now; what is behind may be whole.
        """
        page = page_buffer(PAGE)
        buffer = page
        while start + PAGE <= end:
            try:
                if read_at(self._descriptor, page, start) < PAGE:
                    return
                header = envelope.unpack(page)
                length = envelope.record_bytes(header.size)
                if (header.segment, header.offset) != (self.number, start) or start + length > end:
                    return
                if payloads:
                    buffer = buffer if len(buffer) >= length else page_buffer(length)
                    self.read(Place(self.number, start, header.size), buffer)
            except IntegrityError:
                return
            yield header
            start += length
