"""StoreReader: finds and reads the blocks of a store, beside the process that writes it or without one."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from npu_kvconnector.errors import IntegrityError, StoreError
from npu_kvconnector.tiers.durable import probe
from npu_kvconnector.tiers.durable.envelope import record_bytes
from npu_kvconnector.tiers.durable.files import page_buffer, supports_direct
from npu_kvconnector.tiers.durable.index import Entry, Index
from npu_kvconnector.tiers.durable.recovery import newest_index
from npu_kvconnector.tiers.durable.segments import Place, SegmentReader

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.tiers.durable.envelope import Header

__all__ = ["FORMAT", "LOOK_AGAIN", "Block", "StoreReader", "read_identity"]

FORMAT = 1
"""The version of a store's layout."""

LOOK_AGAIN = 1.0
"""Seconds between looks for the index of a writer that has started anew."""


class Block(NamedTuple):
    """A block that is what was stored; the payload is a view of the buffer it was read into."""

    header: Header
    payload: memoryview


def read_identity(folder: Path) -> bytes:
    """Return the 16 bytes that name a store.

    Raises:
        StoreError: there is no store, or it is of another format.
    """
    path = folder / "store.json"
    try:
        about = json.loads(path.read_bytes())
        identity = bytes.fromhex(about["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{folder} holds no store of KV blocks ({path.name}: {error}); name the path of a durable tier"
        raise StoreError(msg) from error
    found = about.get("format")
    if found != FORMAT or len(identity) != 16:
        update = "update npu-kvconnector, or " if isinstance(found, int) and found > FORMAT else ""
        msg = f"the store in {folder} has format {found!r}, this version reads {FORMAT}: {update}use another path"
        raise StoreError(msg)
    return identity


class StoreReader:
    """Reads a store. A block that is gone, damaged or out of reach is a miss; nothing here raises for it.

    What is asked of the index makes no call to the disk; who reads beside a writer for long calls :meth:`follow`.
    """

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        """Open the store.

        Raises:
            StoreError: there is none, or its index cannot be read.
        """
        self.folder = folder
        self.identity = read_identity(folder)
        self.corrupt = 0
        self.unreadable = 0
        self._segments_folder = folder / "segments"
        self._direct = direct and supports_direct(self._segments_folder)
        self._lock = threading.RLock()
        self._bad: dict[bytes, Place] = {}
        self._index = self._open_index()
        self._has_closed = False

    @property
    def index(self) -> Index:
        """The index, as far as it is durable."""
        return self._index

    @property
    def is_direct(self) -> bool:
        """Whether files are read and written past the page cache."""
        return self._direct

    def discard(self, name: bytes, reason: str) -> None:
        """Give up a block that turned out to be useless, such as one that does not decrypt."""
        entry = self.find(name)
        if entry is not None:
            self._give_up(name, entry, IntegrityError(reason))

    def close(self) -> None:
        """Close the index; safe to call twice."""
        with self._lock:
            self._has_closed = True
            self._index.close()

    def follow(self) -> None:
        """Look for the index of a writer that has started anew; for a thread that may wait for the disk."""
        try:
            newest = newest_index(self.folder)
            if newest is None or newest == self._index.folder:
                return
            fresh = Index(newest, readonly=True)
        except (lmdb.Error, OSError):
            return  # gone again; the next look finds another
        with self._lock:
            if self._has_closed:
                fresh.close()
            else:  # the old one is closed by its last user: another thread may be reading it
                self._index = fresh

    def __contains__(self, name: bytes) -> bool:
        return self.find(name) is not None

    def find(self, name: bytes) -> Entry | None:
        """Return where a block is said to lie, or None."""
        try:
            entry = self._index.get(name)
        except lmdb.Error:
            return None
        if entry is None or self._bad.get(name) == entry.place:
            return None
        return entry

    def read(self, name: bytes, buffer: memoryview | None = None) -> Block | None:
        """Return the block of this name, or None where there is none that is whole.

        Args:
            name: of the block.
            buffer: pages to read into, see :func:`page_buffer`; memory of its own if it is None or too small.
        """
        entry = self.find(name)
        if entry is None:
            return None
        length = record_bytes(entry.place.size)
        if buffer is None or len(buffer) < length:
            buffer = page_buffer(length)
        try:
            with SegmentReader(self._segments_folder, entry.place.segment, direct=self._direct) as segment:
                header, payload = segment.read(entry.place, buffer)
            if header.name != name or header.realm != entry.realm:
                msg = "the record is another block's"
                raise IntegrityError(msg)
        except FileNotFoundError:
            return None  # its segment has been dropped in this moment
        except (IntegrityError, OSError) as error:
            self._give_up(name, entry, error)
            return None
        self._note_use(name, entry)
        return Block(header, payload)

    def _open_index(self) -> Index:
        folder = newest_index(self.folder)
        try:
            if folder is None or not probe.is_readable(folder):
                hint = "start a server on it, which makes it again"
                msg = f"the index of the store in {self.folder} cannot be read; {hint}"
                raise StoreError(msg)
            return Index(folder, readonly=True)
        except (OSError, lmdb.Error) as error:
            msg = f"the index of the store in {self.folder} cannot be opened: {error}"
            raise StoreError(msg) from error

    def _give_up(self, name: bytes, entry: Entry, error: Exception) -> None:
        """Take note of a record that cannot be used; it is a miss from now on."""
        with self._lock:
            if isinstance(error, IntegrityError):
                self.corrupt += 1
            else:
                self.unreadable += 1
            self._bad[name] = entry.place

    def _note_use(self, name: bytes, entry: Entry) -> None:
        """Take note of a use: only the writer keeps it."""
