"""Damages bytes at random, as disks, networks and strangers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

__all__ = ["damaged"]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one of: a bit flipped, a word replaced, cut short, a part lost, doubled, or noise to the end."""
    found, at = bytearray(data), chance.randrange(len(data) or 1)
    size = chance.randint(1, 64)
    kind = chance.randrange(7)
    if kind == 0 and found:
        found[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        found[at : at + 8] = chance.choice((bytes(8), b"\xff" * 8, chance.randbytes(8)))
    elif kind == 2:
        del found[at:]
    elif kind == 3:
        del found[at : at + size]
    elif kind == 4:
        found[at:at] = found[at : at + size]
    elif kind == 5:
        found[at:] = chance.randbytes(len(found) - at)
    else:
        found = bytearray(chance.randbytes(size))
    return bytes(found)
