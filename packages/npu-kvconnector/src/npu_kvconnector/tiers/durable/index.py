"""The index of a store: which record holds a block, what each segment is worth, and what was found damaged. In LMDB.

Databases: ``blocks`` (name to entry), ``places`` (segment and offset to name, to find what a segment holds),
``segments`` (number to how far it is durable), ``realms`` (id to what it stands for, in JSON), ``marks`` (place to why
it was given up) and ``meta``. LMDB keeps no checksums, so each entry has one of its own.

Note [A page of before]. Where a disk loses the write of a page, what it gives back is an older one: whole, each entry
with its checksum, and without the newest blocks. So ``meta`` keeps the sum of what the last transaction left, which is
the XOR of digests of all records of ``blocks``, ``segments`` and ``meta`` itself.

Note [Room for the lock]. LMDB writes to its table of readers as to memory, in a file of holes. Where a disk has no room
for them, that ends the process (SIGBUS). So the room is taken before LMDB opens the file, and not through a descriptor
where it is there already: to close one would give up the locks that this process has on the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import xxhash

from npu_kvconnector.tiers.durable.disk_errors import is_full
from npu_kvconnector.tiers.durable.files import make_folder, open_file
from npu_kvconnector.tiers.durable.segments import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["Batch", "Entry", "Index", "decode_entry", "encode_entry"]

_ENTRY = struct.Struct("<QQQQQ16sdQQ")
_PLACE = struct.Struct(">QQ")  # big-endian: LMDB sorts bytes
_NUMBER = struct.Struct(">Q")
_SUM = b"sum"
_READERS = 512
_LOCK_BYTES = 40_960
"""Of LMDB's table of so many readers: 64 bytes each and what goes before them, in whole pages."""
_DATABASES = (b"blocks", b"places", b"segments", b"realms", b"marks", b"meta")


class Entry(NamedTuple):
    """Where a block lies. Ticks count stores and uses of the store; they do not depend on the clock."""

    place: Place
    block_bytes: int
    codec: int
    realm: bytes
    stored_at: float
    stored_tick: int
    used_tick: int


@dataclasses.dataclass(slots=True)
class Batch:
    """What one transaction changes."""

    puts: dict[bytes, Entry] = dataclasses.field(default_factory=dict)
    forgets: dict[bytes, tuple[Place, str]] = dataclasses.field(default_factory=dict)
    """Names whose record was found damaged: its place, and what was wrong."""
    segments: dict[int, int] = dataclasses.field(default_factory=dict)
    """How far segments are durable, in bytes."""
    dropped: list[int] = dataclasses.field(default_factory=list)
    realms: dict[bytes, dict[str, Any]] = dataclasses.field(default_factory=dict)
    marks: list[tuple[int, int, dict[str, Any]]] = dataclasses.field(default_factory=list)
    meta: dict[str, int] = dataclasses.field(default_factory=dict)


def encode_entry(name: bytes, entry: Entry) -> bytes:
    """Return the bytes of an entry, with a checksum over them and the name."""
    packed = _ENTRY.pack(
        *entry.place,
        entry.block_bytes,
        entry.codec,
        entry.realm,
        entry.stored_at,
        entry.stored_tick,
        entry.used_tick,
    )
    return packed + xxhash.xxh3_64_digest(name + packed)


def decode_entry(name: bytes, data: bytes) -> Entry | None:
    """Return the entry, or None where it is damaged."""
    packed = data[:-8]
    if len(packed) != _ENTRY.size or xxhash.xxh3_64_digest(name + packed) != data[-8:]:
        return None
    segment, offset, size, *rest = _ENTRY.unpack(packed)
    return Entry(Place(segment, offset, size), *rest)


def _digest(key: bytes, data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key + data)


class Index:
    """One LMDB environment. Reads take no lock; one process writes. An error is an ``lmdb.Error``."""

    def __init__(self, folder: Path, *, map_size: int = 0, readonly: bool = False) -> None:
        """Open or make it; ``map_size`` is the most bytes that it may take, which a reader learns from the file.

        Raises:
            OSError: there is no room for it.
        """
        self.folder = folder
        if not readonly:
            make_folder(folder)
        _take_room(folder / "lock.mdb")
        self._environment = lmdb.open(
            os.fspath(folder),
            map_size=0 if readonly else map_size or 4 * 2**20,
            max_dbs=len(_DATABASES),
            readonly=readonly,
            create=not readonly,
            mode=0o600,
            max_readers=_READERS,
        )
        try:
            self._environment.reader_check()
            blocks, places, segments, realms, marks, meta = [
                self._environment.open_db(name, create=not readonly) for name in _DATABASES
            ]
        except lmdb.Error:
            self._environment.close()
            raise
        self._blocks, self._places, self._segments = blocks, places, segments
        self._realms, self._marks, self._meta = realms, marks, meta

    def close(self) -> None:
        """Close it; safe to call twice."""
        self._environment.close()

    def __len__(self) -> int:
        with self._environment.begin(self._blocks) as transaction:
            return int(transaction.stat(self._blocks)["entries"])

    def fill(self) -> float:
        """Return the share of the space for the index that is in use."""
        with self._environment.begin() as transaction:
            parts = [transaction.stat(each) for each in (self._blocks, self._places, self._marks)]
        pages = sum(part["branch_pages"] + part["leaf_pages"] + part["overflow_pages"] for part in parts)
        return float(pages * parts[0]["psize"] / self._environment.info()["map_size"])

    def get(self, name: bytes) -> Entry | None:
        """Return the entry of a name; None where there is none, or it is damaged."""
        with self._environment.begin(self._blocks) as transaction:
            data = transaction.get(name)
        return None if data is None else decode_entry(name, data)

    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield all names and entries, as they are when this begins; damaged ones are left out."""
        with self._environment.begin(self._blocks) as transaction:
            for name, data in transaction.cursor():
                entry = decode_entry(name, data)
                if entry is not None:
                    yield name, entry

    def held_by(self, segment: int) -> list[tuple[bytes, Entry]]:
        """Return what a segment holds, in the order of its places."""
        prefix = _NUMBER.pack(segment)
        found = []
        with self._environment.begin() as transaction:
            cursor = transaction.cursor(self._places)
            is_there = cursor.set_range(prefix)
            while is_there and cursor.key().startswith(prefix):
                name = cursor.value()
                data = transaction.get(name, db=self._blocks)
                entry = None if data is None else decode_entry(name, data)
                if entry is not None and entry.place[:2] == _PLACE.unpack(cursor.key()):
                    found.append((name, entry))
                is_there = cursor.next()
        return found

    def segments(self) -> dict[int, int]:
        """Return how far each segment is durable, in bytes."""
        return {_NUMBER.unpack(key)[0]: _NUMBER.unpack(data)[0] for key, data in self._all(self._segments)}

    def realms(self) -> dict[bytes, dict[str, Any]]:
        """Return what the realms stand for."""
        return {key: json.loads(data) for key, data in self._all(self._realms)}

    def marks(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Return segment, offset and reason of records that were given up."""
        return [(*_PLACE.unpack(key), json.loads(data)) for key, data in self._all(self._marks)]

    def meta(self) -> dict[str, int]:
        """Return the counters: ``tick``, ``next_segment``."""
        return {key.decode(): _NUMBER.unpack(data)[0] for key, data in self._all(self._meta) if key != _SUM}

    def is_whole(self) -> bool:
        """Return whether this is what the last transaction left; see Note [A page of before]."""
        left = 0
        with self._environment.begin() as transaction:
            for database in (self._blocks, self._segments, self._meta):
                for key, data in transaction.cursor(database):
                    left ^= _digest(key, data) if key != _SUM else _NUMBER.unpack(data)[0]
        return left == 0

    def commit(self, batch: Batch) -> None:
        """Make the changes, all or none, durable when this returns."""
        with self._change() as transaction:
            for name, entry in batch.puts.items():
                self._put(transaction, name, entry)
            for name, (place, reason) in batch.forgets.items():
                self._remove(transaction, name, place)
                mark = json.dumps({"name": name.hex(), "reason": reason})
                transaction.put(_PLACE.pack(*place[:2]), mark.encode(), db=self._marks)
            for segment, used in batch.segments.items():
                self._set(transaction, self._segments, _NUMBER.pack(segment), _NUMBER.pack(used))
            for segment in batch.dropped:
                self._drop(transaction, segment)
            for realm, about in batch.realms.items():
                transaction.put(realm, json.dumps(about, sort_keys=True).encode(), db=self._realms)
            for segment, offset, about in batch.marks:
                transaction.put(_PLACE.pack(segment, offset), json.dumps(about).encode(), db=self._marks)
            for key, number in batch.meta.items():
                self._set(transaction, self._meta, key.encode(), _NUMBER.pack(number))

    def forget(self, names: Iterable[bytes]) -> int:
        """Remove blocks from the index alone, and return how many were there."""
        with self._change() as transaction:
            count = 0
            for name in names:
                data = transaction.get(name, db=self._blocks)
                entry = None if data is None else decode_entry(name, data)
                if entry is not None:
                    self._remove(transaction, name, entry.place)
                    count += 1
        return count

    @contextlib.contextmanager
    def _change(self) -> Iterator[Any]:
        """Begin a transaction that keeps the sum; it ends with this."""
        with self._environment.begin(write=True) as transaction:
            self._sum = _NUMBER.unpack(transaction.get(_SUM, bytes(8), db=self._meta))[0]
            yield transaction
            transaction.put(_SUM, _NUMBER.pack(self._sum), db=self._meta)

    def _set(self, transaction: Any, database: Any, key: bytes, data: bytes | None) -> None:
        """Change or, by None, remove a record of those that are summed."""
        if data is None:
            before = transaction.pop(key, db=database)
        else:
            before = transaction.replace(key, data, db=database)
            self._sum ^= _digest(key, data)
        if before is not None:
            self._sum ^= _digest(key, before)

    def _all(self, database: Any) -> list[tuple[bytes, bytes]]:
        with self._environment.begin(database) as transaction:
            return list(transaction.cursor())

    def _put(self, transaction: Any, name: bytes, entry: Entry) -> None:
        before = transaction.get(name, db=self._blocks)
        old = None if before is None else decode_entry(name, before)
        if old is not None and old.place != entry.place:
            transaction.delete(_PLACE.pack(*old.place[:2]), db=self._places)
        self._set(transaction, self._blocks, name, encode_entry(name, entry))
        transaction.put(_PLACE.pack(*entry.place[:2]), name, db=self._places)

    def _remove(self, transaction: Any, name: bytes, place: Place) -> None:
        """Remove a name, but not where it is in another place by now."""
        data = transaction.get(name, db=self._blocks)
        entry = None if data is None else decode_entry(name, data)
        if data is not None and (entry is None or entry.place == place):
            self._set(transaction, self._blocks, name, None)
        transaction.delete(_PLACE.pack(*place[:2]), db=self._places)

    def _drop(self, transaction: Any, segment: int) -> None:
        prefix = _NUMBER.pack(segment)
        for database in (self._places, self._marks):
            cursor = transaction.cursor(database)
            found = []
            is_there = cursor.set_range(prefix)
            while is_there and cursor.key().startswith(prefix):
                found.append((cursor.key(), cursor.value()))
                is_there = cursor.next()
            for key, name in found:
                if database is self._places:
                    number, offset = _PLACE.unpack(key)
                    self._remove(transaction, name, Place(number, offset, self._size_at(transaction, name)))
                else:
                    transaction.delete(key, db=database)
        self._set(transaction, self._segments, prefix, None)

    def _size_at(self, transaction: Any, name: bytes) -> int:
        data = transaction.get(name, db=self._blocks)
        entry = None if data is None else decode_entry(name, data)
        return 0 if entry is None else entry.place.size


def _take_room(lock: Path) -> None:
    """Have the disk keep room for LMDB's lock; see Note [Room for the lock].

    Raises:
        OSError: it has none, or fails.
    """
    if lock.exists() and lock.stat().st_blocks * 512 >= _LOCK_BYTES:
        return
    try:
        descriptor = open_file(lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if is_full(error):
            raise
        return  # a reader that may not write there: LMDB says more
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_BYTES)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:  # a filesystem that keeps no room
            raise
    finally:
        os.close(descriptor)
