"""What peers say to each other, in msgpack; blocks follow their message as frames of their own, sealed.

A message is an array: its kind, then its fields in order. What does not decode as one of these is dropped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "ANSWERS",
    "HASH_SEED",
    "LONGEST_ASK",
    "MOST_ASKED",
    "QUESTIONS",
    "UNREADABLE",
    "VERSION",
    "Blocks",
    "Done",
    "Find",
    "Found",
    "Get",
    "Keep",
    "Refused",
    "encode",
]

VERSION = 3
"""Of this protocol; peers of another are refused by name."""

LONGEST_ASK = 4 << 20
"""Bytes of a question, more than a hundred thousand names."""

MOST_ASKED = 32
"""Questions for blocks that a server has under way; ZeroMQ drops answers that its queue for a peer has no room for."""

HASH_SEED = "PYTHONHASHSEED"

Seq = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Key = Annotated[bytes, msgspec.Meta(min_length=36, max_length=36)]
Transfer = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Realm = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Find(msgspec.Struct, tag="find", array_like=True, frozen=True):
    """Which of these blocks does the transfer have? Those that are being computed are waited for."""

    seq: Seq
    version: int
    realm: Realm
    seed: str
    """Of the hashes of blocks: with another one nothing would ever be found."""
    transfer: Transfer
    wait: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds after which the answer is what there is."""
    names: list[Name]
    keys: list[Key] = []
    """Where there are any, these are asked for, and of all that the server has; what is found is in the transfer then.
    They are vLLM's, since the host tier is not indexed by names. Who holds the secret could make the names of them."""


class Get(msgspec.Struct, tag="get", array_like=True, frozen=True):
    """Send these blocks."""

    seq: Seq
    realm: Realm
    seed: str
    """As of :class:`Find`: who was refused there gets nothing here either, on whatever connection it asks."""
    transfer: Transfer
    names: list[Name]


class Keep(msgspec.Struct, tag="keep", array_like=True, frozen=True):
    """These transfers are still wanted: their requests wait for their turn. There is no answer."""

    transfers: list[Transfer]


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """These transfers are not wanted any more. There is no answer."""

    transfers: list[Transfer]


class Found(msgspec.Struct, tag="found", array_like=True, frozen=True):
    """Whether each block asked for is there."""

    seq: Seq
    found: list[bool]


class Blocks(msgspec.Struct, tag="blocks", array_like=True, frozen=True):
    """As many frames follow as were asked for: sealed blocks, and empty ones for those that are not there."""

    seq: Seq


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The two servers cannot exchange blocks; what the blocks here are, for a message that says why."""

    seq: Seq
    version: int
    seed: str
    kind: str
    """JSON of :func:`npu_kvconnector.fingerprint.describe`."""


QUESTIONS = msgspec.msgpack.Decoder(Find | Get | Keep | Done)
ANSWERS = msgspec.msgpack.Decoder(Found | Blocks | Refused)

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises for bytes that are no message; of text that is no UTF-8, msgspec raises Python's own error."""

encode = msgspec.msgpack.Encoder().encode
"""Return a message's bytes."""
