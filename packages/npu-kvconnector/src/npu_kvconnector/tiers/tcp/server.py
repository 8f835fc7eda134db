"""BlockServer: hands the blocks of an outbox to peers that hold the secret, over ZeroMQ with CURVE on TCP.

Whatever arrives that is no question is dropped; a peer that does not take its answers loses them, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from npu_kvconnector.tiers.tcp import messages
from npu_kvconnector.tiers.tcp.messages import VERSION, Blocks, Done, Find, Found, Get, Keep, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_kvconnector.p2p.channel import ChannelKeys
    from npu_kvconnector.tiers.tcp.outbox import Outbox
    from npu_kvconnector.tiers.tcp.probe import Probes

__all__ = ["BlockServer", "Kind", "prepare"]

logger = init_logger("vllm.npu_kvconnector")

_MOST_WAITING = 4096  # questions that wait for blocks to come; further ones are answered with what there is
_LONGEST_WAIT = 60.0
_MOST_ANSWERS = 8 * messages.MOST_ASKED  # in the queue of one peer, where answers about blocks wait behind blocks, too
_EXPIRY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What two servers must have in common to exchange blocks."""

    realm: bytes
    """16 bytes: model, layout, namespace and secret."""
    description: str
    """What the realm says of model and layout, as JSON."""
    seed: Callable[[], str]
    """Returns the seed of block hashes, which vLLM settles after its tiers are made."""


class BlockServer:
    """Answers questions of peers in the event loop that runs :meth:`run`."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        keys: ChannelKeys,
        outbox: Outbox,
        probes: Probes,
        kind: Kind,
        note: Callable[[str, int], None],
    ) -> None:
        """Listen.

        Args:
            context: of ZeroMQ, whose threads carry the bytes.
            address: "tcp://host:port".
            keys: of the channel, of the servers that share a secret.
            outbox: what is handed out.
            probes: fills it with what else is here.
            kind: of the blocks in it.
            note: called with "sent" or "expired" and a number of blocks.

        Raises:
            zmq.ZMQError: the address cannot be listened on.
        """
        self._outbox = outbox
        self._probes = probes
        self._kind = kind
        self._note = note
        self._waiting: set[asyncio.Task[None]] = set()
        self._socket: Any = context.socket(zmq.ROUTER)
        prepare(self._socket)
        self._socket.maxmsgsize = messages.LONGEST_ASK
        self._socket.sndhwm = _MOST_ANSWERS
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server
        self._socket.curve_publickey = zmq.curve_public(keys.server)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    async def run(self) -> None:
        """Answer until cancelled."""
        expiry = asyncio.create_task(self._expire())
        try:
            while True:
                frames = await self._socket.recv_multipart()
                try:
                    await self._take(frames)
                except Exception:  # whatever a peer sends must not end the others' answers
                    logger.exception("A question of a peer was dropped")
        finally:
            expiry.cancel()
            for task in self._waiting:
                task.cancel()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)

    async def _take(self, frames: list[bytes]) -> None:
        """Do what a message asks for, or drop it."""
        if len(frames) != 2:  # who it is from, and the message
            return
        identity, data = frames
        try:
            message = messages.QUESTIONS.decode(data)
        except messages.UNREADABLE:
            return
        match message:
            case Find():
                await self._find(identity, message)
            case Get():
                await self._get(identity, message)
            case Keep():
                self._outbox.keep(message.transfers)
            case Done():
                self._probes.cancel(message.transfers)
                self._outbox.drop(message.transfers)

    async def _find(self, identity: bytes, message: Find) -> None:
        """Answer at once where everything is there or settled, and else beside what comes next."""
        if message.version != VERSION or not self._is_of_our_kind(message):
            await self._refuse(identity, message)
            return
        wait = 0.0 if len(self._waiting) >= _MOST_WAITING else min(message.wait, _LONGEST_WAIT)
        task = asyncio.create_task(self._answer(identity, message, wait))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _get(self, identity: bytes, message: Get) -> None:
        if not self._is_of_our_kind(message):
            await self._refuse(identity, message)
            return
        records = self._outbox.get(message.transfer, message.names)
        self._note("sent", sum(record is not None for record in records))
        await self._send(identity, Blocks(message.seq), *(b"" if record is None else record for record in records))

    def _is_of_our_kind(self, message: Find | Get) -> bool:
        return (message.realm, message.seed) == (self._kind.realm, self._kind.seed())

    async def _refuse(self, identity: bytes, message: Find | Get) -> None:
        await self._send(identity, Refused(message.seq, VERSION, self._kind.seed(), self._kind.description))

    async def _answer(self, identity: bytes, message: Find, wait: float) -> None:
        if message.keys:
            found = await self._probes.ask(message.transfer, [OffloadKey(key) for key in message.keys], wait)
        else:
            found = await self._outbox.find(message.transfer, message.names, wait)
        await self._send(identity, Found(message.seq, found))

    async def _send(self, identity: bytes, message: Any, *records: Any) -> None:
        # The records are not copied: nothing changes them, and ZeroMQ holds them until they are sent.
        await self._socket.send_multipart([identity, messages.encode(message), *records], copy=False)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            number = self._outbox.expire()
            if number:
                self._note("expired", number)


def prepare(socket: Any) -> None:
    """Set what all sockets of peers have: nothing is kept for a peer that is gone, or whose host is."""
    socket.linger = 0
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 10_000
    socket.heartbeat_ttl = 10_000
