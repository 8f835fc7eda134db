"""Peers that talk nonsense, with the secret and without: nothing of it is taken, and the others are served."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from npu_kvconnector.p2p.channel import ChannelKeys
from npu_kvconnector.tiers.tcp import client, messages
from npu_kvconnector.tiers.tcp.messages import Blocks, Find, Found, Get, Keep, Refused
from npu_kvconnector.tiers.tcp.params import params_for, source_of
from tests.support.fuzz import damaged
from tests.support.remote_tier import BLOCK, block_of, key_of
from tests.support.stores import free_port
from tests.support.tcp_tier import TcpServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Serve = Callable[..., TcpServer]

KEYS = ChannelKeys.derive(b"0123456789abcdef")
NAME, REALM = bytes(32), bytes(16)
FUZZED = [1_000, pytest.param(100_000, marks=pytest.mark.nightly)]
KEYS_OF_VLLM = [key_of(number) for number in range(3)]


@contextlib.contextmanager
def liar(answer: Callable[[list[bytes]], list[bytes]]) -> Iterator[dict[str, Any]]:
    """Yield where a peer is that holds the secret and answers each question with these frames."""
    port, ready, stop = free_port(), threading.Event(), threading.Event()

    def run() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
            server.linger = 0
            server.curve_server = True
            server.curve_secretkey, server.curve_publickey = KEYS.server, zmq.curve_public(KEYS.server)
            server.bind(f"tcp://127.0.0.1:{port}")
            ready.set()
            while not stop.is_set():
                if server.poll(20):
                    identity, *question = server.recv_multipart()
                    server.send_multipart([identity, *answer(question)])

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield params_for("t", "127.0.0.1", port)
    finally:
        stop.set()
        thread.join(10)


def found_first(answer: Callable[[int], list[bytes]]) -> Callable[[list[bytes]], list[bytes]]:
    """Return a peer that says that it has everything, and then answers so."""

    def reply(question: list[bytes]) -> list[bytes]:
        message = messages.QUESTIONS.decode(question[0])
        if isinstance(message, Find):
            return [messages.encode(Found(message.seq, [True] * len(message.keys or message.names)))]
        return answer(message.seq) if isinstance(message, Get) else [b""]

    return reply


@pytest.mark.parametrize(
    "answer",
    [
        lambda seq: [b""],
        lambda seq: [messages.encode(Blocks(seq))],
        lambda seq: [messages.encode(Blocks(seq)), b"", b"", b""],
        lambda seq: [messages.encode(Blocks(seq)), os.urandom(128 + BLOCK), os.urandom(128 + BLOCK)],
        lambda seq: [messages.encode(Blocks(seq)), b"NPUKVBLK", bytes(64)],
        lambda seq: [messages.encode(Found(seq, [True, True]))],
        lambda seq: [messages.encode(Refused(seq, 7, "", ""))],
        lambda seq: [messages.encode(Refused(seq, 1, "", "not json"))],
        lambda seq: [messages.encode(Blocks(seq + 1)), bytes(128 + BLOCK), bytes(128 + BLOCK)],
    ],
    ids=["empty", "too-few", "too-many", "noise", "stumps", "no-blocks", "version", "not-json", "another-s"],
)
def test_blocks_that_are_none_are_not_taken(serve: Serve, answer: Callable[[int], list[bytes]]) -> None:
    decode = serve({"deadline": 0.5})
    with liar(found_first(answer)) as params:
        request = decode.begin(params)
        assert decode.lookup(request, 1, 2) == [True, True]
        result, blocks = decode.load(request, 1, 2)
    assert not result.success
    assert not result.successful_keys
    assert blocks == [b"\xee" * BLOCK] * 2
    assert decode.counts()["failures"] >= 1


@pytest.mark.parametrize(
    "answer",
    [
        [messages.encode(Found(0, []))],
        [messages.encode(Found(0, [True] * 3))],
        [messages.encode(["found", 0, [1, 0]])],
        [messages.encode(Refused(0, 1, "0", "[]"))],
        [messages.encode({"found": 0})],
        [messages.encode(Refused(0, 1, "seed", "[]")).replace(b"seed", b"\xf8eed")],
    ],
    ids=["too-few", "too-many", "no-truths", "a-list", "a-map", "no-utf8"],
)
def test_answers_to_the_question_that_are_none_are_misses(serve: Serve, answer: list[bytes]) -> None:
    """And at once: nobody waits for another one."""
    decode, begin = serve({"deadline": 60}), time.monotonic()
    with liar(lambda _: answer) as params:
        assert decode.lookup(decode.begin(params), 1, 2) == [False, False]
    assert time.monotonic() - begin < 30
    assert decode.counts()["failures"] >= 1


def test_who_claims_to_have_everything_is_not_believed_either(serve: Serve) -> None:
    two = serve({"deadline": 0.5})
    with liar(
        found_first(lambda seq: [messages.encode(Blocks(seq)), *(os.urandom(128 + BLOCK) for _ in "ab")])
    ) as params:
        place = {"kv_request_id": "t", "remote_host": params["remote_host"], "remote_port": params["remote_port"]}
        request = two.begin({"remote_kv_source": place})
        assert two.lookup(request, 1, 2) == [True, True]
        result, blocks = two.load(request, 1, 2)
    assert not result.successful_keys
    assert blocks == [b"\xee" * BLOCK] * 2
    assert two.counts()["rejected_blocks"] == 2


def test_damaged_answers_never_become_blocks(serve: Serve) -> None:
    """Answers of a real server, damaged in all ways of the project's fuzzer; a block that loads is the right one."""
    prefill, decode = serve(), serve({"deadline": 0.2})
    prefill.compute(1, params={"remote_decoder": {"kv_request_id": "t"}})
    (entry,) = prefill.tier._exchange.outbox._transfers.values()
    (record,) = entry.records.values()
    chance = random.Random(0)

    def answer(seq: int) -> list[bytes]:
        frames = [bytearray(messages.encode(Blocks(seq))), bytearray(record)]
        which = chance.randrange(2)
        frames[which] = bytearray(damaged(frames[which], chance))
        return [bytes(frame) for frame in frames]

    wrong = right = 0
    with liar(found_first(answer)) as params:
        for _ in range(300):
            for peer in decode.tier._exchange.peers.values():
                peer._breaker.succeed() if peer._breaker.state == 0 else setattr(peer._breaker, "state", 0)
            request = decode.begin(params)
            if decode.lookup(request, 1) != [True]:
                continue
            result, (block,) = decode.load(request, 1)
            assert block == (block_of(1) if result.success else b"\xee" * BLOCK)
            right += result.success
            wrong += not result.success
    assert wrong > 200


@pytest.mark.parametrize("rounds", FUZZED)
def test_fuzzed_records_are_blocks_or_left_out(serve: Serve, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they come from a connection that nothing is wrong with."""
    monkeypatch.setattr(client.logger, "disabled", True)
    prefill, decode = serve(), serve()
    answer = prefill.compute(1)
    (entry,) = prefill.tier._exchange.outbox._transfers.values()
    (record,) = entry.records.values()
    source, chance, exchange = source_of(answer), random.Random(2), decode.tier._exchange
    assert source is not None

    async def fuzz() -> int:
        taken = 0
        for _ in range(rounds):
            decode.memory[1] = 0xEE
            some = exchange._take([(key_of(1), 1)], [damaged(bytearray(record), chance)], source)
            assert decode.memory[1].tobytes() == (block_of(1) if some else b"\xee" * BLOCK)
            taken += len(some)
        return taken

    assert decode.tier._loop.submit(fuzz()).result() < rounds / 2
    decode.memory[1] = 0xEE
    assert exchange._take([(key_of(1), 1)], [record], source) == [key_of(1)]


@pytest.mark.parametrize("rounds", [5_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_questions_that_are_none_are_dropped_and_the_others_answered(
    serve: Serve, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = serve(), serve()
    params = prefill.compute(*range(10))
    assert params is not None
    chance, kind = random.Random(1), prefill.tier._exchange._kind
    good = [
        messages.encode(Find(0, 1, REALM, "0", "t", 0.0, [NAME])),
        messages.encode(Find(0, messages.VERSION, kind.realm, kind.seed(), "t", 0.0, [], [bytes(36), *KEYS_OF_VLLM])),
        messages.encode(Get(0, kind.realm, kind.seed(), params["remote_request_id"], [NAME])),
        messages.encode(Keep(["t"])),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        socket_.linger = 0
        socket_.curve_serverkey = zmq.curve_public(KEYS.server)
        socket_.curve_secretkey, socket_.curve_publickey = KEYS.client, zmq.curve_public(KEYS.client)
        socket_.connect(f"tcp://127.0.0.1:{prefill.port}")
        for _ in range(rounds):
            frame = bytearray(chance.choice(good) if chance.random() < 0.5 else chance.randbytes(chance.randint(0, 99)))
            socket_.send_multipart([bytes(damaged(frame, chance)) for _ in range(chance.choice((1, 1, 1, 2)))])
            while socket_.poll(0):
                messages.ANSWERS.decode(socket_.recv_multipart()[0])
        last = 2**40
        socket_.send(messages.encode(Find(last, messages.VERSION, kind.realm, kind.seed(), "t", 0.0, [NAME])))
        while socket_.poll(60_000):  # until the server has come to the last of them
            if messages.ANSWERS.decode(socket_.recv_multipart()[0]).seq == last:
                break
        assert decode.fetch(params, *range(10))[0] == [True] * 10
    assert not [record.message for record in caplog.records if record.exc_info]


def test_a_question_that_is_too_long_ends_its_connection_alone(serve: Serve) -> None:
    prefill, decode = serve(), serve()
    params = prefill.compute(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        socket_.linger = 0
        socket_.curve_serverkey = zmq.curve_public(KEYS.server)
        socket_.curve_secretkey, socket_.curve_publickey = KEYS.client, zmq.curve_public(KEYS.client)
        socket_.connect(f"tcp://127.0.0.1:{prefill.port}")
        socket_.send(bytes(messages.LONGEST_ASK + 1))
        assert not socket_.poll(300)
        assert decode.fetch(params, 1)[1] == [block_of(1)]


def test_who_has_no_secret_is_not_heard(serve: Serve) -> None:
    prefill, decode = serve(), serve()
    params, kind = prefill.compute(1), prefill.tier._exchange._kind
    assert params is not None
    for size in (0, 1, 64, 5000):
        with socket.create_connection(("127.0.0.1", prefill.port), 5) as noise:
            noise.sendall(os.urandom(size))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:  # in the clear
        socket_.linger = 0
        socket_.connect(f"tcp://127.0.0.1:{prefill.port}")
        socket_.send(messages.encode(Get(0, kind.realm, kind.seed(), params["remote_request_id"], [NAME])))
        assert not socket_.poll(300)
    assert decode.fetch(params, 1)[1] == [block_of(1)]
