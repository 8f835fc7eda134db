"""The side channel: heard by those who hold the secret, and alive whatever is sent to it."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from npu_kvconnector.p2p.channel import ChannelKeys, relay, serve
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = ChannelKeys.derive(b"s" * 16)


@pytest.fixture
def port() -> Iterator[int]:
    """Serve on a port: a request is answered twice over, one that begins with "?" is dropped."""
    number, ready, stop = free_port(), threading.Event(), threading.Event()

    def answer(request: bytes) -> list[bytes] | None:
        return None if request.startswith(b"?") else [request, request]

    address = f"tcp://127.0.0.1:{number}"
    thread = threading.Thread(target=serve, args=(address, KEYS, answer), kwargs={"ready": ready, "stop": stop})
    thread.start()
    assert ready.wait(10)
    yield number
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def ask(port: int, *messages: bytes, keys: ChannelKeys = KEYS, seconds: float = 5.0) -> list[list[bytes]]:
    """Ask as vLLM's client does, through a relay."""
    with (
        relay("127.0.0.1", port, keys, seconds=seconds) as local,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
    ):
        socket.linger = 0
        socket.rcvtimeo = 20_000
        socket.connect(f"tcp://127.0.0.1:{local}")
        replies = []
        for message in messages:
            socket.send(message)
            replies.append(socket.recv_multipart())
        return replies


def test_who_holds_the_secret_is_answered(port: int) -> None:
    assert ask(port, b"one", b"two") == [[b"one", b"one"], [b"two", b"two"]]


def test_who_does_not_is_not(port: int) -> None:
    stranger = ChannelKeys.derive(b"t" * 16)
    assert ask(port, b"one", keys=stranger, seconds=0.5) == [[b""]]
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"in the clear")
        assert not socket.poll(500)
    assert ask(port, b"one") == [[b"one", b"one"]]


def test_no_answer_is_an_empty_one_in_time() -> None:
    began = time.monotonic()
    assert ask(free_port(), b"one", seconds=0.3) == [[b""]]
    assert time.monotonic() - began < 10


def test_dropped_requests_and_noise_end_nothing(port: int) -> None:
    import socket

    assert ask(port, b"?" + os.urandom(100), seconds=0.3) == [[b""]]
    for size in (0, 1, 64, 5000):
        with socket.create_connection(("127.0.0.1", port), 5) as noise:
            noise.sendall(os.urandom(size))
    assert ask(port, b"one") == [[b"one", b"one"]]
