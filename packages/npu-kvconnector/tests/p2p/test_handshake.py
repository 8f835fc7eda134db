"""The handshake: what vLLM's client asks is answered, and nothing else, whatever its bytes."""

from __future__ import annotations

import functools
import os
import random
import socket
import threading

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

from npu_kvconnector.errors import OptionError
from npu_kvconnector.p2p.channel import ChannelKeys, serve
from npu_kvconnector.p2p.scheduler import TicketScheduler, answer_handshake
from tests.support.fuzz import damaged
from tests.support.stores import free_port

DATA = {(0, 0): b"first worker", (0, 1): b"second worker"}


def question(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


def test_workers_are_told_apart() -> None:
    for ranks, data in DATA.items():
        answer = answer_handshake(DATA, question(b"get_meta_msg", *ranks))
        assert answer is not None
        assert answer[0] == data
        assert msgspec.msgpack.decode(answer[1], type=float) > 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        question(b"get_meta_msg", 0),
        question(b"get_meta_msg", 0, 2),
        question(b"get_meta_msg", 0, "0"),
        question(b"get_meta_msg", 0, 0, 0),
        question(b"another", 0, 0),
        question(b"get_meta_msg", 0, 2**64 - 1),
        msgspec.msgpack.encode({"get_meta_msg": 0}),
    ],
)
def test_other_questions_are_dropped(request_bytes: bytes) -> None:
    assert answer_handshake(DATA, request_bytes) is None


def test_100_000_frames_of_noise_are_dropped() -> None:
    chance, good = random.Random(0), question(b"get_meta_msg", 0, 0)
    for _ in range(100_000):
        frame = bytearray(good if chance.random() < 0.5 else chance.randbytes(chance.randint(0, 64)))
        for _ in range(chance.randint(1, 3)):
            at = chance.randint(0, len(frame))
            frame[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
        answer = answer_handshake(DATA, bytes(frame))
        assert answer is None or answer[0] in DATA.values()


GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\0" + b"CURVE".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0
HELLO = b"\4\xc8\5HELLO\1\0" + bytes(72) + bytes(range(120))


@pytest.mark.parametrize("rounds", [500, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_a_channel_outlives_fuzzed_frames(rounds: int) -> None:
    """Frames of who holds the secret, and a hundredth as many connections of who does not."""
    chance, keys, good = random.Random(rounds), ChannelKeys.derive(b"s" * 16), question(b"get_meta_msg", 0, 1)
    port, ready, stop = free_port(), threading.Event(), threading.Event()
    answer = functools.partial(answer_handshake, DATA)
    address, events = f"tcp://127.0.0.1:{port}", {"ready": ready, "stop": stop}
    thread = threading.Thread(target=serve, args=(address, keys, answer), kwargs=events)
    thread.start()
    assert ready.wait(10)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.rcvtimeo = 0, 20_000
        client.curve_serverkey, client.curve_secretkey = zmq.curve_public(keys.server), keys.client
        client.curve_publickey = zmq.curve_public(keys.client)
        client.connect(address)
        for number in range(rounds):
            before = [chance.randbytes(chance.randint(0, 8)) for _ in range(chance.randint(0, 3))]
            client.send_multipart([*before, damaged(good, chance)])
            while client.poll(0):
                assert client.recv_multipart()[1] in DATA.values()
            if number % 100 == 0:
                with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                    stranger.sendall(damaged(GREETING + HELLO, chance))
        client.send_multipart([b"", question(b"get_meta_msg", 0, 0)])
        while client.recv_multipart()[1] != DATA[0, 0]:
            pass
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_port_that_is_taken_is_told_and_nobody_waits_for_it() -> None:
    scheduler = TicketScheduler.__new__(TicketScheduler)
    scheduler._keys, scheduler._refused = ChannelKeys.derive(b"secret"), None
    scheduler._nixl_handshake_listener_t, scheduler._stop_event = None, threading.Event()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        scheduler.side_channel_host, scheduler.side_channel_port = taken.getsockname()
        with pytest.raises(OptionError, match=r"in use\): set VLLM_NIXL_SIDE_CHANNEL_PORT to a port that no other"):
            scheduler.set_xfer_handshake_metadata({})
