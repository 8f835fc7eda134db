"""The envelope: what was sealed opens under its own key and realm, and nothing else opens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_kvconnector.envelope import HEADER_BYTES, Realm
from npu_kvconnector.errors import IntegrityError

KEY, OTHER = b"k" * 36, b"o" * 36
REALMS = {"plain": Realm(b"model"), "secret": Realm(b"model", secret=b"s" * 32)}
BLOCK = bytes(range(256)) * 4


def seal(realm: Realm, key: bytes = KEY, block: bytes = BLOCK) -> bytes:
    return realm.header(key, block, plain_bytes=len(block)) + block


@pytest.mark.parametrize("realm", REALMS.values(), ids=REALMS)
@pytest.mark.parametrize("block", [b"", b"x", BLOCK], ids=len)
def test_a_block_comes_back(realm: Realm, block: bytes) -> None:
    opened = realm.open(KEY, bytearray(seal(realm, block=block)))
    assert (bytes(opened.payload), opened.codec, opened.plain_bytes) == (block, 0, len(block))


def test_a_header_has_its_length() -> None:
    assert len(seal(REALMS["plain"], block=b"")) == HEADER_BYTES


@pytest.mark.parametrize(
    "other",
    [
        Realm(b"another model"),
        Realm(b"model", "another namespace"),
        Realm(b"model", secret=b"s" * 32),
        Realm(b"model", secret=b"t" * 32),
    ],
    ids=["model", "namespace", "a-secret", "another-secret"],
)
def test_another_realm_neither_finds_nor_opens_a_block(other: Realm) -> None:
    realm = REALMS["plain"]
    assert other.name(KEY) != realm.name(KEY)
    with pytest.raises(IntegrityError, match="realm"):
        other.open(KEY, seal(realm))


@pytest.mark.parametrize("realm", REALMS.values(), ids=REALMS)
def test_a_block_of_another_key_does_not_open(realm: Realm) -> None:
    with pytest.raises(IntegrityError, match="name"):
        realm.open(KEY, seal(realm, OTHER))


def test_a_record_is_forged_only_with_the_secret() -> None:
    """Who knows the format and the realm's name, but not the secret, gets no further than the digest."""
    realm, forger = REALMS["secret"], Realm(b"model", secret=b"guess" * 4)
    forged = bytearray(seal(forger, block=b"evil" * 256))
    forged[16:32], forged[32:64] = realm.id, realm.name(KEY)
    forged[96:128] = forger._digest(bytes(forged[:96]), b"evil" * 256)
    with pytest.raises(IntegrityError, match="digest"):
        realm.open(KEY, forged)


@pytest.mark.parametrize("realm", REALMS.values(), ids=REALMS)
@given(data=st.data())
def test_a_damaged_record_does_not_open(realm: Realm, data: st.DataObject) -> None:
    record = bytearray(seal(realm))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "zero", "swap"]))
    at = data.draw(st.integers(0, len(record) - 1))
    if kind == "flip":
        record[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del record[at:]
    elif kind == "grow":
        record[at:at] = data.draw(st.binary(min_size=1, max_size=200))
    elif kind == "zero":
        record[at : at + 512] = bytes(len(record[at : at + 512]))
    else:
        record[at:] = seal(realm, OTHER)[at:]
    if record == seal(realm):
        return
    with pytest.raises(IntegrityError):
        realm.open(KEY, record)


@pytest.mark.nightly
@pytest.mark.parametrize("realm", REALMS.values(), ids=REALMS)
def test_none_of_100_000_damaged_records_opens(realm: Realm) -> None:
    whole, chance = seal(realm), random.Random(0)
    for _ in range(100_000):
        record = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(record))
            if chance.random() < 0.5:
                record[at] ^= 1 << chance.randrange(8)
            else:
                record[at : at + chance.randint(1, 64)] = chance.randbytes(chance.randint(0, 64))
        if record == whole:
            continue
        with pytest.raises(IntegrityError):
            realm.open(KEY, record)


@given(st.binary(max_size=400))
def test_no_bytes_open_by_chance(record: bytes) -> None:
    with pytest.raises(IntegrityError):
        REALMS["plain"].open(KEY, record)
