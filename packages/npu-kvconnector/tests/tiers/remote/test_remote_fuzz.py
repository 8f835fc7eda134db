"""Whatever a store answers, a block is the one that was stored or a miss: packs, records, payloads and replies, fuzzed."""

from __future__ import annotations

import contextlib
import random
import socketserver
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from npu_kvconnector.envelope import Realm
from npu_kvconnector.errors import IntegrityError
from npu_kvconnector.tiers.remote.codec import decode, open_codec
from npu_kvconnector.tiers.remote.pack import TABLE_BYTES, join, read_table
from npu_kvconnector.tiers.remote.store import Record
from tests.support.fuzz import damaged
from tests.support.remote_tier import BLOCK, CHUNKS, Server, block_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.stores import ValkeyServer

    Serve = Callable[..., Server]

FUZZED = [2_000, pytest.param(100_000, marks=pytest.mark.nightly)]
SMALL = 512  # bytes of the blocks that no tier carries


def sealed(realm: Realm, number: int, codec: Any) -> Record:
    block = block_of(number, SMALL)
    payload = codec.encode(block) if codec is not None else None
    body, kind = (block, 0) if payload is None else (payload, codec.number)
    return Record(
        realm.name(key_of(number)), realm.header(key_of(number), body, plain_bytes=SMALL, codec=kind), bytes(body)
    )


@pytest.mark.parametrize("secret", [b"", b"s" * 16], ids=["digests", "keyed"])
@pytest.mark.parametrize("rounds", FUZZED)
def test_fuzzed_packs_hold_what_was_stored_or_nothing(rounds: int, secret: bytes) -> None:
    chance, realm = random.Random(rounds), Realm(b"model", secret=secret)
    codecs = [None, open_codec("zstd", "bfloat16")]
    packs = [join([sealed(realm, number, codec) for number in range(4)])[0] for codec in codecs]
    table_bytes = 16 + 4 * 48
    tables = found = 0
    for number in range(rounds):
        pack = bytearray(damaged(packs[number % 2], chance))
        if number % 3 == 0 and len(pack) > table_bytes + 16:  # by somebody who knows how to make a table
            pack[:table_bytes] = damaged(packs[number % 2][:table_bytes], chance).ljust(table_bytes, b"\0")[
                :table_bytes
            ]
            pack[table_bytes : table_bytes + 16] = xxhash.xxh3_128(pack[:table_bytes]).digest()
        try:
            places = read_table(bytes(pack[:TABLE_BYTES]), len(pack))
        except IntegrityError:
            continue
        tables += 1
        for place in places:
            for wanted in range(4):
                with contextlib.suppress(IntegrityError):
                    record = bytes(pack[place.offset : place.offset + place.length])
                    payload, codec, plain_bytes = realm.open(key_of(wanted), record)
                    found += 1
                    assert bytes(decode(codecs[number % 2], codec, payload, plain_bytes)) == block_of(wanted, SMALL)
    assert rounds // 20 < tables < rounds
    assert found > tables // 2


@pytest.mark.parametrize("name", ["none", "zstd", "fp8"])
@pytest.mark.parametrize("rounds", FUZZED)
def test_fuzzed_payloads_are_blocks_or_refused(rounds: int, name: str) -> None:
    """Their seals are good: without a secret anybody can make them."""
    chance, codec = random.Random(rounds), open_codec(name, "bfloat16")
    block = block_of(1, SMALL)
    good = bytes(codec.encode(block) or block) if codec is not None else block
    refused = 0
    for _ in range(rounds):
        try:
            found = decode(codec, codec.number if codec is not None else 0, damaged(good, chance), SMALL)
        except IntegrityError:
            refused += 1
        else:
            assert memoryview(found).nbytes == SMALL
    assert refused > rounds // 10


@pytest.mark.parametrize("rounds", FUZZED)
def test_fuzzed_values_of_a_store_are_misses(
    serve: Serve, valkey: ValkeyServer, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through the whole tier, 64 blocks a load."""
    import valkey as client

    chance, beside = random.Random(rounds), client.Valkey.from_url(valkey.url)
    server, numbers = serve({"url": valkey.url, "deadline": 60.0}), range(CHUNKS)
    monkeypatch.setattr(server.tier._courtesy, "rest", lambda ahead: 0.0)  # beside other work a load would take seconds
    assert server.store(*numbers).success
    prefix = beside.keys("npukv:*")[0][:-32]
    names = [prefix + server.tier._realm.name(key_of(number)) for number in numbers]
    good = beside.mget(names)
    left_out = 0
    for _ in range(0, rounds, CHUNKS):
        values = [damaged(chance.choice(good) if chance.random() < 0.1 else each, chance) for each in good]
        values[0] = good[0]
        beside.mset(dict(zip(names, values, strict=True)))
        server.memory[:] = 0xEE
        result, blocks = server.load(*numbers)
        for number in numbers:
            is_loaded = key_of(number) in (result.successful_keys or ())
            assert is_loaded == (values[number] == good[number])
            assert blocks[number] == (block_of(number) if is_loaded else b"\xee" * BLOCK)
            left_out += not is_loaded
        beside.mset(dict(zip(names, good, strict=True)))
    assert left_out > 0.9 * rounds
    assert server.load(*numbers)[1] == [block_of(number) for number in numbers]


REPLIES = (
    *(b"+OK", b":1", b"$-1", b"*-1", b"*2\r\n:1\r\n:0", b"-ERR no", b":one", b"$x", b"*x"),
    *(b"*1\r\n$999999999999", b"*9999999", b"*1\r\n" * 2000, b""),
)


class Liar(socketserver.ThreadingTCPServer):
    """Answers every request of Valkey's protocol with a damaged reply, often one to another request."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, seed: int) -> None:
        self.chance, self.lies = random.Random(seed), 0
        self.block = b"$%d\r\n%s\r\n" % (BLOCK, block_of(1))
        super().__init__(("127.0.0.1", 0), _Lie)

    def reply(self) -> bytes:
        self.lies += 1
        chance = self.chance
        whole = chance.choice([*REPLIES, b"*4\r\n" + self.block * 4])
        return (whole if chance.random() < 0.5 else damaged(whole, chance)) + b"\r\n"


class _Lie(socketserver.BaseRequestHandler):
    server: Liar

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self.request.recv(1 << 16):
                self.request.sendall(self.server.reply())


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar(1) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("rounds", [5, pytest.param(300, marks=pytest.mark.nightly)])
def test_a_store_that_answers_nonsense_has_no_blocks(serve: Serve, liar: Liar, rounds: int) -> None:
    place = f"valkey://127.0.0.1:{liar.server_address[1]}/0"
    for number in range(rounds):
        server = serve({"url": place, "deadline": 0.1, "lookup_deadline": 0.05})  # the breaker of another is open
        server.memory[:] = 0xEE
        server.lookup(1, 2, 3)
        result, blocks = server.load(1, 2, 3, 4)
        assert not result.successful_keys, number
        assert blocks == [b"\xee" * BLOCK] * 4
        server.store(number)
        server.tier.shutdown()
    assert liar.lies > rounds


def test_memory_is_not_taken_for_what_a_payload_only_claims() -> None:
    codec = open_codec("zstd", "bfloat16")
    assert codec is not None
    import zstandard

    frame = zstandard.ZstdCompressor().compress(np.zeros(1 << 28, np.uint8).tobytes())
    with pytest.raises(IntegrityError, match="does not decompress to 512"):
        decode(codec, codec.number, b"\2" + frame, SMALL)
