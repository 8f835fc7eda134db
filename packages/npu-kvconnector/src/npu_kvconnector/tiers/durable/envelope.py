"""The envelope of a block on disk: one page that says what follows it, whose it is and where it belongs.

A record is this page, then the payload, filled up to whole pages (integers are little-endian)::

    offset  bytes  meaning
         0      8  b"NPUKVREC"
         8      2  version of this format, 1
        10      2  codec of the payload: 0 plain, 1 AES-256-GCM
        12      4  zero
        16      8  segment, and
        24      8  offset in it, where this record belongs
        32     16  realm: model, layout, namespace and secret (npu_kvconnector.envelope.Realm)
        48     32  name of the block within the realm
        80      8  bytes of the payload as stored
        88      8  bytes of the block
        96      8  time of the store, seconds since 1970
       104     16  XXH3-128 of bytes 0 to 103 and of the payload
       120      8  XXH3-64 of bytes 0 to 119

The name and the place are under the digest, so that a block that was written elsewhere, or for another key, is noticed
as surely as one that has changed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.durable.files import PAGE, round_up

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["AES_GCM", "PLAIN", "Header", "pack", "record_bytes", "unpack", "verify"]

PLAIN, AES_GCM = 0, 1

_MAGIC = b"NPUKVREC"
_VERSION = 1
_FIELDS = struct.Struct("<8sHHIQQ16s32sQQd")
_END = _FIELDS.size + 16 + 8


class Header(NamedTuple):
    """What an envelope says about its block."""

    segment: int
    offset: int
    realm: bytes
    name: bytes
    size: int
    block_bytes: int
    codec: int
    stored_at: float
    digest: bytes = b""


def record_bytes(size: int) -> int:
    """Return the bytes on disk of a record with a payload of ``size`` bytes."""
    return PAGE + round_up(size)


def pack(header: Header, payload: Buffer, page: memoryview) -> None:
    """Write the envelope of ``payload`` to the first bytes of a page."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        header.codec,
        0,
        header.segment,
        header.offset,
        header.realm,
        header.name,
        header.size,
        header.block_bytes,
        header.stored_at,
    )
    start = fields + _digest(fields, payload)
    page[:_END] = start + xxhash.xxh3_64_digest(start)


def unpack(page: memoryview) -> Header:
    """Return what the envelope in this page says; the payload is not looked at.

    Raises:
        IntegrityError: there is none, or it is damaged or of another format.
    """
    start = bytes(page[: _END - 8])
    if len(page) < _END or xxhash.xxh3_64_digest(start) != bytes(page[_END - 8 : _END]):
        msg = "there is no whole envelope"
        raise IntegrityError(msg)
    magic, version, codec, _, segment, offset, realm, name, size, block_bytes, stored_at = _FIELDS.unpack_from(start)
    if magic != _MAGIC or version != _VERSION:
        msg = f"the envelope is of another format ({magic!r}, version {version})"
        raise IntegrityError(msg)
    return Header(segment, offset, realm, name, size, block_bytes, codec, stored_at, start[_FIELDS.size :])


def verify(page: memoryview, payload: Buffer) -> Header:
    """Return what the envelope says, once the payload has been found to be what was stored.

    Raises:
        IntegrityError: envelope or payload are damaged.
    """
    header = unpack(page)
    if memoryview(payload).nbytes != header.size:
        msg = f"the payload has {memoryview(payload).nbytes} bytes, not {header.size}"
        raise IntegrityError(msg)
    if _digest(bytes(page[: _FIELDS.size]), payload) != header.digest:
        msg = "the payload is not what was stored"
        raise IntegrityError(msg)
    return header


def _digest(fields: bytes, payload: Buffer) -> bytes:
    state = xxhash.xxh3_128(fields)
    state.update(payload)
    return bytes(state.digest())
