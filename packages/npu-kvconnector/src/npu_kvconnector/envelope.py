"""The envelope of a KV block that leaves the engine: what it holds, whose it is, and the proof that it is whole.

A record is a header of 128 bytes, then the payload as stored::

    offset  bytes  meaning (integers are little-endian)
         0      8  b"NPUKVBLK"
         8      2  version of this format, 1
        10      2  codec of the payload, 0 for none
        12      4  zero
        16     16  realm: model, layout, namespace and secret
        32     32  name of the block within the realm
        64      8  bytes of the payload as stored
        72      8  bytes of the block once decoded
        80     16  zero
        96     32  digest of bytes 0 to 95 and of the payload

The digest is XXH3-128 and 16 zero bytes, which notices damage; in a realm with a secret it is keyed BLAKE3, which also
notices forgery. The name is part of it, so that a block that was stored or returned under another's name does not open.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, NamedTuple

import blake3
import xxhash

from npu_kvconnector.errors import IntegrityError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HEADER_BYTES", "Opened", "Realm"]

HEADER_BYTES = 128

_MAGIC = b"NPUKVBLK"
_VERSION = 1
_FIELDS = struct.Struct("<8sHHI16s32sQQ16x")


class Opened(NamedTuple):
    """A record that is whole and of this realm."""

    payload: memoryview
    codec: int
    plain_bytes: int


class Realm:
    """Names and seals the blocks of one model, layout, namespace and secret; others' blocks do not open here."""

    def __init__(self, fingerprint: bytes, namespace: str = "", secret: bytes = b"") -> None:
        """Derive the realm's keys.

        Args:
            fingerprint: of the model and the layout of its blocks, see :mod:`npu_kvconnector.fingerprint`.
            namespace: chosen by the user, to keep blocks of one model apart.
            secret: shared by the servers of a tenant; without it, names can be guessed and blocks forged.
        """
        root = hmac.digest(secret or b"npu-kvconnector", fingerprint + namespace.encode(), "sha256")
        self.id = hmac.digest(root, b"realm", "sha256")[:16]
        self._naming = hmac.digest(root, b"names", "sha256")
        self._sealing = hmac.digest(root, b"seals", "sha256") if secret else None

    def name(self, key: bytes) -> bytes:
        """Return the 32 bytes under which the block of this offload key is kept (HMAC-SHA256)."""
        return hmac.digest(self._naming, key, "sha256")

    def header(self, key: bytes, payload: Buffer, *, plain_bytes: int, codec: int = 0) -> bytes:
        """Return the header that makes ``payload`` a record; the payload itself is not copied."""
        size = memoryview(payload).nbytes
        fields = _FIELDS.pack(_MAGIC, _VERSION, codec, 0, self.id, self.name(key), size, plain_bytes)
        return fields + self._digest(fields, payload)

    def open(self, key: bytes, record: Buffer) -> Opened:
        """Return what the record of this key holds; the payload is a view.

        Raises:
            IntegrityError: it is cut short, damaged, of another format, realm or key, or forged.
        """
        view = memoryview(record).cast("B")
        if len(view) < HEADER_BYTES:
            msg = f"a record has a header of {HEADER_BYTES} bytes, this one has {len(view)} bytes in all"
            raise IntegrityError(msg)
        fields, payload = bytes(view[:96]), view[HEADER_BYTES:]
        magic, version, codec, _, realm, name, size, plain_bytes = _FIELDS.unpack(fields)
        expected = {
            "magic number": (magic, _MAGIC),
            "format": (version, _VERSION),
            "realm": (realm, self.id),
            "name": (name, self.name(key)),
            "length": (size, len(payload)),
        }
        for field, (found, wanted) in expected.items():
            if found != wanted:
                msg = f"the record's {field} is {found!r}, not {wanted!r}"
                raise IntegrityError(msg)
        if not hmac.compare_digest(bytes(view[96:HEADER_BYTES]), self._digest(fields, payload)):
            msg = "the record's digest does not match its bytes"
            raise IntegrityError(msg)
        return Opened(payload, codec, plain_bytes)

    def _digest(self, fields: bytes, payload: Buffer) -> bytes:
        if self._sealing is not None:
            return bytes(blake3.blake3(fields, key=self._sealing).update(payload).digest())
        state = xxhash.xxh3_128(fields)
        state.update(payload)
        return bytes(state.digest()).ljust(32, b"\0")
