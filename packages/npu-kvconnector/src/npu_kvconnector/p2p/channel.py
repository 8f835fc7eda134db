"""The side channel on which servers learn how to reach each other's memory: ZeroMQ with CURVE instead of in the clear.

Both key pairs derive from the servers' secret. A client must know the server's public key to be heard at all, and that
key is sent nowhere, so only who holds the secret gets further than the first message.
"""

from __future__ import annotations

import contextlib
import hmac
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
import zmq.utils.z85

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ChannelKeys", "relay", "serve"]

_POLL_MILLISECONDS = 100
_LONGEST_MESSAGE = 1 << 20


class ChannelKeys(NamedTuple):
    """Secret keys of both ends, in Z85."""

    server: bytes
    client: bytes

    @classmethod
    def derive(cls, secret: bytes) -> ChannelKeys:
        """Return the keys of the servers that share a secret."""
        ends = (hmac.digest(secret, end, "sha256") for end in (b"channel server", b"channel client"))
        return cls(*(zmq.utils.z85.encode(key) for key in ends))


def serve(
    address: str,
    keys: ChannelKeys,
    answer: Callable[[bytes], list[bytes] | None],
    *,
    ready: threading.Event,
    stop: threading.Event,
) -> None:
    """Answer requests until ``stop`` is set; ``answer`` returns the frames of a reply, or None for a request to drop.

    Raises:
        zmq.ZMQError: the address cannot be listened on.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        _prepare(socket)
        socket.curve_server = True
        socket.curve_secretkey = keys.server
        socket.curve_publickey = zmq.curve_public(keys.server)
        socket.bind(address)
        ready.set()
        while not stop.is_set():
            if not socket.poll(_POLL_MILLISECONDS):
                continue
            frames = socket.recv_multipart()
            reply = answer(frames[-1]) if len(frames) > 1 else None
            if reply is not None:
                socket.send_multipart([frames[0], b"", *reply])


@contextlib.contextmanager
def relay(host: str, port: int, keys: ChannelKeys, *, seconds: float) -> Iterator[int]:
    """Yield a port of this host whose requests are passed on to a server, encrypted.

    vLLM's client has no keys, so it asks here. A request without an answer within ``seconds`` gets an empty one, which
    the client takes for a failure.
    """
    stop = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as inner:
        _prepare(inner)
        local = inner.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(
            target=_pass_on, args=(context, inner, f"tcp://{host}:{port}", keys, seconds, stop), name="npu-kv-relay"
        )
        thread.start()
        try:
            yield int(local)
        finally:
            stop.set()
            thread.join()


def _pass_on(context: Any, inner: Any, address: str, keys: ChannelKeys, seconds: float, stop: threading.Event) -> None:
    while not stop.is_set():
        if not inner.poll(_POLL_MILLISECONDS):
            continue
        identity, *request = inner.recv_multipart()
        # A socket a request: one that went unanswered must not answer the next.
        with context.socket(zmq.DEALER) as outer:
            _prepare(outer)
            outer.curve_serverkey = zmq.curve_public(keys.server)
            outer.curve_secretkey = keys.client
            outer.curve_publickey = zmq.curve_public(keys.client)
            outer.connect(address)
            outer.send_multipart(request)
            reply = outer.recv_multipart() if outer.poll(int(1000 * seconds)) else [b"", b""]
        inner.send_multipart([identity, *reply])


def _prepare(socket: Any) -> None:
    socket.linger = 0
    socket.maxmsgsize = _LONGEST_MESSAGE
