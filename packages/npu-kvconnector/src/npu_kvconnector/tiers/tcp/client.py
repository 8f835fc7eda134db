"""Peer: one server that blocks are fetched from, with its connections, deadlines and circuit breaker.

Runs in one event loop. Connections are used in turn, since each is encrypted by one thread. When one fails in any way,
all are given up with what was asked on them, and the next question opens another: so no answer is ever taken for that
to another question.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor
from vllm.logger import init_logger

from npu_kvconnector.config import GuardConfig
from npu_kvconnector.errors import StoreError
from npu_kvconnector.tiers.breaker import CircuitBreaker
from npu_kvconnector.tiers.tcp import messages
from npu_kvconnector.tiers.tcp.messages import VERSION, Blocks, Done, Find, Found, Get, Keep, Refused
from npu_kvconnector.tiers.tcp.server import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from npu_kvconnector.p2p.channel import ChannelKeys
    from npu_kvconnector.tiers.tcp.server import Kind

__all__ = ["Peer"]

logger = init_logger("vllm.npu_kvconnector")

_PATIENCE = GuardConfig(failures=3, open_seconds=1.0, max_open_seconds=60.0)
"""When a peer is left alone, and all of its blocks are computed at once; the guard's numbers are of the whole tier."""
_OTHER_ANSWER = "it answers something else than was asked"
_WAIT_SHARE = 0.8  # of the deadline: for so long the peer waits for blocks that come, to answer in time with the others
_ENDS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Peer:
    """Asks one peer for blocks. All failures are StoreError, and are counted by the breaker."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        keys: ChannelKeys,
        kind: Kind,
        *,
        connections: int,
        deadline: float,
        block_bytes: int,
        note: Callable[[], None],
    ) -> None:
        """Take note of the peer; the connection is opened by the first question.

        Args:
            context: of ZeroMQ, whose threads carry the bytes.
            address: "host:port".
            keys: of the channel, of the servers that share a secret.
            kind: of the blocks here.
            connections: how many are used in turn.
            deadline: seconds for an answer.
            block_bytes: of a sealed block at most; longer frames end the connection.
            note: called at each failure.
        """
        self.address = address
        self._context = context
        self._keys = keys
        self._kind = kind
        self._deadline = deadline
        self._longest = max(block_bytes, messages.LONGEST_ASK)
        self._note = note
        self._breaker = CircuitBreaker(_PATIENCE)
        self._connections: list[_Connection | None] = [None] * connections
        self._next = itertools.cycle(range(connections))
        self._refusal = ""
        self._given_up = 0  # how often all connections were

    @property
    def is_left_alone(self) -> bool:
        """Whether too much has failed lately; nothing is asked then."""
        return not self._breaker.allows()

    async def find(self, transfer: str, names: Sequence[bytes]) -> list[bool]:
        """Say for each name whether the peer has the block in a transfer."""

        def question(seq: int) -> Find:
            wait = _WAIT_SHARE * self._deadline
            return Find(seq, VERSION, self._kind.realm, self._kind.seed(), transfer, wait, list(names))

        return await self._find(question, len(names))

    async def probe(self, transfer: str, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the peer has the block anywhere; those that it has are in the transfer then."""

        def question(seq: int) -> Find:
            wait = _WAIT_SHARE * self._deadline
            return Find(seq, VERSION, self._kind.realm, self._kind.seed(), transfer, wait, [], list(keys))

        return await self._find(question, len(keys))

    async def get(self, transfer: str, names: Sequence[bytes]) -> list[Buffer]:
        """Return the sealed blocks of these names, as they came; empty ones are not there."""
        kind = self._kind
        answer, frames = await self._ask(lambda seq: Get(seq, kind.realm, kind.seed(), transfer, list(names)))
        if not isinstance(answer, Blocks) or len(frames) != len(names):
            raise self._failed(_OTHER_ANSWER)
        self._breaker.succeed()
        return frames

    async def keep(self, transfers: Iterable[str]) -> None:
        """Say that transfers are still wanted."""
        await self._tell(Keep(list(transfers)))

    async def done(self, transfers: Iterable[str]) -> None:
        """Say that transfers are not wanted any more."""
        await self._tell(Done(list(transfers)))

    def fail(self, reason: str) -> None:
        """Take note of a failure that shows in what the peer sent; its connection is given up."""
        self._failed(reason)

    def close(self) -> None:
        """Give the connections up."""
        self._given_up += 1
        for place, connection in enumerate(self._connections):
            self._connections[place] = None
            if connection is not None:
                connection.close("the connection was given up")

    async def _find(self, question: Callable[[int], Find], number: int) -> list[bool]:
        answer, _ = await self._ask(question)
        if not isinstance(answer, Found) or len(answer.found) != number:
            raise self._failed(_OTHER_ANSWER)
        self._breaker.succeed()
        return answer.found

    async def _ask(self, question: Callable[[int], Any]) -> tuple[Any, list[Buffer]]:
        if self.is_left_alone:
            msg = f"{self.address} is left alone for a while"
            raise StoreError(msg)
        self._breaker.begin()
        given_up = self._given_up
        try:
            async with asyncio.timeout(self._deadline):
                answer, frames = await self._connected().ask(question)
        except (StoreError, TimeoutError, zmq.ZMQError) as error:
            reason = str(error) or f"no answer in {self._deadline} s"
            if self._given_up != given_up:  # for another question, which was counted
                msg = f"{self.address}: {reason}"
                raise StoreError(msg) from error
            raise self._failed(reason) from error
        if isinstance(answer, Refused):
            raise self._failed(_differences(answer, self._kind))
        return answer, frames

    async def _tell(self, message: Any) -> None:
        if not self.is_left_alone:
            with contextlib.suppress(StoreError, TimeoutError, zmq.ZMQError):  # it is no loss
                async with asyncio.timeout(self._deadline):
                    await self._connected().send(message)

    def _connected(self) -> _Connection:
        place = next(self._next)
        connection = self._connections[place]
        if connection is None or connection.is_closed:
            connection = _Connection(self._context, self.address, self._keys, self._longest)
            self._connections[place] = connection
        return connection

    def _failed(self, reason: str) -> StoreError:
        """Give the connection up, count, tell a new reason once; return the error to raise."""
        self.close()
        self._note()
        if self._breaker.fail():
            logger.warning("Peer %s is left alone for a while, and its blocks are computed", self.address)
        if reason != self._refusal:
            self._refusal = reason
            logger.warning("Peer %s: %s", self.address, reason)
        return StoreError(f"{self.address}: {reason}")


class _Connection:
    """A socket to a peer, and what was asked on it; closed at its first error, and never used again."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: ChannelKeys, longest: int) -> None:
        self.is_closed = False
        self._asked: dict[int, asyncio.Future[tuple[Any, list[Buffer]]]] = {}
        self._numbers = itertools.count()
        self._is_secured = False
        self._socket: Any = context.socket(zmq.DEALER)
        prepare(self._socket)
        self._socket.maxmsgsize = longest
        self._socket.immediate = True  # nothing is queued for a peer that is not there
        self._socket.reconnect_ivl = -1
        self._socket.curve_serverkey = zmq.curve_public(keys.server)
        self._socket.curve_secretkey = keys.client
        self._socket.curve_publickey = zmq.curve_public(keys.client)
        self._monitor: Any = self._socket.get_monitor_socket(_ENDS | _REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._read())]
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close(str(error))
            raise

    async def ask(self, question: Callable[[int], Any]) -> tuple[Any, list[Buffer]]:
        """Send a question under a number of its own; return the answer of that number, and the frames behind it."""
        seq = next(self._numbers)
        answer: asyncio.Future[tuple[Any, list[Buffer]]] = asyncio.get_running_loop().create_future()
        self._asked[seq] = answer
        sending = asyncio.ensure_future(self.send(question(seq)))
        try:
            # The connection may end before the peer takes the question.
            await asyncio.wait((sending, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                sending.result()
            return await answer
        finally:
            sending.cancel()
            self._asked.pop(seq, None)

    async def send(self, message: Any) -> None:
        """Send a message as soon as the peer is there."""
        if self.is_closed:
            msg = "the connection was given up"
            raise StoreError(msg)
        await self._socket.send(messages.encode(message))

    def close(self, reason: str) -> None:
        """Let all that was asked fail."""
        if self.is_closed:
            return
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(StoreError(reason))
                answer.exception()  # taken note of, also where nobody waits any more
        self._socket.disable_monitor()
        self._socket.close(linger=0)
        self._monitor.close(linger=0)

    async def _read(self) -> None:
        while True:
            first, *frames = await self._socket.recv_multipart(copy=False)
            try:
                message = messages.ANSWERS.decode(first.buffer)
            except messages.UNREADABLE:
                self.close("it answers something that is no answer")
                return
            answer = self._asked.get(message.seq)
            if answer is not None and not answer.done():
                answer.set_result((message, [frame.buffer for frame in frames]))

    async def _watch(self) -> None:
        """End the connection when ZeroMQ sees it end."""
        while True:
            event = (await zmq.utils.monitor.recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_secured = True
                continue
            if self._is_secured:
                reason = "the connection was lost"
            elif event == zmq.EVENT_CLOSED:
                reason = "it cannot be reached"
            else:
                reason = "it does not accept the connection: is secret_file the same there?"
            self.close(reason)
            return


def _differences(answer: Refused, kind: Kind) -> str:
    """Return why two servers cannot exchange blocks, and the way out where there is one."""
    if answer.version != VERSION:
        return f"it speaks version {answer.version} of the protocol, not {VERSION}: install the same npu-kvconnector"
    if answer.seed != kind.seed():
        return f"its block hashes begin with another seed: set {messages.HASH_SEED} to the same value for both"
    here = json.loads(kind.description)
    try:
        there = msgspec.json.decode(answer.kind, type=dict[str, Any])
    except msgspec.MsgspecError:
        return "its blocks are of another kind, of which it says nothing that can be read"
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not names:
        return "it has another namespace: write the same in both configurations"
    texts = [f"{name} is {str(there.get(name))[:80]} there and {str(here.get(name))[:80]} here" for name in names]
    hint = '; "canonical_layout": true on both lets their parallel sizes differ' if "parallel" in names else ""
    return f"its blocks are of another kind: {', '.join(texts)}{hint}"
