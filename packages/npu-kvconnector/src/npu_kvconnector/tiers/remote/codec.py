"""Codecs of a block's payload: bytes as they are, smaller and exact (zstd), or about half and rounded (fp8).

zstd compresses the block's low and high bytes apart, since exponents repeat and mantissas hardly do: on bfloat16 caches
the result is about two thirds. fp8 keeps 64 values together as E4M3 with one float32 scale, 53 % of a 16-bit cache; a
value comes back with a relative error of at most 2**-4 (those below 1/28672 of the largest of the 64 lose more), so the
tokens of a request that loads such blocks may differ from those of one that computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from npu_kvconnector.errors import IntegrityError, OptionError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PLAIN", "Codec", "decode", "open_codec"]

PLAIN = 0
"""The codec of a payload that is the block itself."""

_ZSTD, _FP8 = 1, 2
_LEVEL = 1  # higher ones gain some percent and cost several times as much
_GROUP = 64
_LARGEST = 448.0  # of float8_e4m3fn
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16, "float32": torch.float32}
_ITEMS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


class Codec(Protocol):
    """Makes payloads of blocks."""

    number: int

    def encode(self, block: Buffer) -> Buffer | None:
        """Return the payload, or None where the block is better stored plain."""
        ...

    def decode(self, payload: Buffer, plain_bytes: int) -> Buffer:
        """Return the block, for which no more memory is taken than its ``plain_bytes``, whatever the payload says."""
        ...


def open_codec(name: str, dtype: str) -> Codec | None:
    """Return the codec of that name for caches of ``dtype``, or None for plain payloads.

    Raises:
        OptionError: fp8 for a cache that is not of floating-point numbers of 16 or 32 bits; zstd is not installed.
    """
    if name == "none":
        return None
    known = _DTYPES.get(dtype.removeprefix("torch."))
    if name == "fp8":
        if known is None:
            msg = (
                f'codec "fp8" rounds caches of bfloat16, float16 and float32; this one is {dtype}: use "zstd" or "none"'
            )
            raise OptionError(msg)
        return _Fp8(known)
    return _Zstd(_ITEMS.get(known, 1) if known is not None else 1)


def decode(codec: Codec | None, number: int, payload: Buffer, plain_bytes: int) -> Buffer:
    """Return the block of a payload.

    Raises:
        IntegrityError: it was made by a codec that this tier does not use, or does not come to ``plain_bytes``.
    """
    if number == PLAIN:
        block = payload
    elif codec is not None and number == codec.number:
        block = codec.decode(payload, plain_bytes)
    else:
        msg = f"the record is of codec {number}, which this tier does not use"
        raise IntegrityError(msg)
    if memoryview(block).nbytes != plain_bytes:
        msg = f"the record holds {memoryview(block).nbytes} bytes, not {plain_bytes}"
        raise IntegrityError(msg)
    return block


class _Zstd:
    """Planes of bytes, each compressed; the first byte of a payload is the number of planes."""

    number = _ZSTD

    def __init__(self, planes: int) -> None:
        try:
            import zstandard
        except ImportError as error:
            msg = 'codec "zstd" needs zstandard: install npu-kvconnector[remote]'
            raise OptionError(msg) from error
        self._module = zstandard
        self._planes = planes

    def encode(self, block: Buffer) -> Buffer | None:
        plain = np.frombuffer(memoryview(block), np.uint8)
        if len(plain) % self._planes:
            return None
        apart = np.ascontiguousarray(plain.reshape(-1, self._planes).T)
        packed: bytes = self._module.ZstdCompressor(level=_LEVEL).compress(apart.tobytes())
        return bytes([self._planes]) + packed if len(packed) + 1 < len(plain) else None

    def decode(self, payload: Buffer, plain_bytes: int) -> Buffer:
        view = memoryview(payload)
        msg = f"the record does not decompress to {plain_bytes} bytes"
        try:
            if self._module.frame_content_size(view[1:]) != plain_bytes:  # as much would be allocated
                raise IntegrityError(msg)
            plain = self._module.ZstdDecompressor().decompress(view[1:])
            together = np.frombuffer(plain, np.uint8).reshape(view[0], -1).T
        except (self._module.ZstdError, ValueError, IndexError) as error:
            raise IntegrityError(msg) from error
        return np.ascontiguousarray(together).tobytes()


class _Fp8:
    """Scales of all groups (float32), then their values (E4M3)."""

    number = _FP8

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._item = _ITEMS[dtype]

    def encode(self, block: Buffer) -> Buffer | None:
        if memoryview(block).nbytes % (_GROUP * self._item):
            return None
        values = torch.frombuffer(memoryview(block), dtype=self._dtype).float().view(-1, _GROUP)
        largest = values.abs().amax(dim=1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            return None  # infinity and NaN have no scale
        scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
        rounded = (values / scales).to(torch.float8_e4m3fn)
        return scales.numpy().tobytes() + rounded.view(torch.uint8).numpy().tobytes()

    def decode(self, payload: Buffer, plain_bytes: int) -> Buffer:
        view = memoryview(payload)
        groups, rest = divmod(view.nbytes, 4 + _GROUP)
        if rest or not groups:
            msg = f"a payload in fp8 has groups of {4 + _GROUP} bytes, this one has {view.nbytes} bytes"
            raise IntegrityError(msg)
        whole = torch.frombuffer(bytearray(view), dtype=torch.uint8)
        scales = whole[: 4 * groups].view(torch.float32).view(-1, 1)
        values = whole[4 * groups :].view(torch.float8_e4m3fn).view(-1, _GROUP).float()
        return bytes((values * scales).to(self._dtype).view(torch.uint8).numpy().tobytes())
