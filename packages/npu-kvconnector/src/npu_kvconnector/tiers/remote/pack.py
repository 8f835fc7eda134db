"""Packs: the records of several blocks in one object, with a table of them at its beginning.

::

    offset  bytes    meaning (integers are little-endian)
         0      8    b"NPUKVPAK"
         8      4    version of this format, 1
        12      4    number of records, n, at most 1024
        16   48 n    per record: name (32 bytes), offset in the object, length
      next     16    XXH3-128 of all before
      then           the records

The table's digest tells a torn or foreign object from a pack; what its records hold is for their envelopes to prove.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from npu_kvconnector.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_kvconnector.tiers.remote.store import Record

__all__ = ["MOST_RECORDS", "TABLE_BYTES", "Place", "join", "read_table"]

MOST_RECORDS = 1024

_MAGIC, _VERSION = b"NPUKVPAK", 1
_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<32sQQ")
_DIGEST_BYTES = 16

TABLE_BYTES = _HEAD.size + MOST_RECORDS * _ENTRY.size + _DIGEST_BYTES
"""Bytes to read from the beginning of an object to have its table, whatever its length."""


class Place(NamedTuple):
    """Where a record lies in its object."""

    name: bytes
    offset: int
    length: int


def join(records: Sequence[Record]) -> tuple[bytes, list[Place]]:
    """Return the object that holds the records, and where each lies in it."""
    places, offset = [], _HEAD.size + len(records) * _ENTRY.size + _DIGEST_BYTES
    for record in records:
        length = len(record.header) + memoryview(record.payload).nbytes
        places.append(Place(record.name, offset, length))
        offset += length
    table = _HEAD.pack(_MAGIC, _VERSION, len(records)) + b"".join(_ENTRY.pack(*place) for place in places)
    digest = xxhash.xxh3_128(table).digest()
    return b"".join([table, digest, *(part for record in records for part in record[1:])]), places


def read_table(head: bytes, object_bytes: int) -> list[Place]:
    """Return the places of a pack's records from its first ``TABLE_BYTES`` bytes, or all of it where it is shorter.

    Raises:
        IntegrityError: this is no pack, it is damaged, or names bytes that the object does not have.
    """
    if len(head) < _HEAD.size:
        msg = f"a pack has more than {len(head)} bytes"
        raise IntegrityError(msg)
    magic, version, count = _HEAD.unpack_from(head)
    end = _HEAD.size + count * _ENTRY.size
    if (magic, version) != (_MAGIC, _VERSION) or count > MOST_RECORDS or len(head) < end + _DIGEST_BYTES:
        msg = f"the object begins with {magic!r}, version {version}, {count} records: not a pack of this format"
        raise IntegrityError(msg)
    if xxhash.xxh3_128(head[:end]).digest() != head[end : end + _DIGEST_BYTES]:
        msg = "the digest of the pack's table does not match it"
        raise IntegrityError(msg)
    places = [Place(*fields) for fields in _ENTRY.iter_unpack(head[_HEAD.size : end])]
    if any(place.offset + place.length > object_bytes for place in places):
        msg = f"the pack's table names bytes beyond the object's {object_bytes}"
        raise IntegrityError(msg)
    return places
