"""ValkeyStore: one record a key in Valkey or Redis; TLS and passwords as the servers' own tools take them.

Note [Sent as it lies]. A value is a header and a block. The client's own commands want it in one piece, which is a copy
of every block while the engine's Python waits. So the commands that save blocks are written here, and a block goes from
the host tier to the socket. Until it has been sent its bytes must stay what they are: who gives up sooner cuts the
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import valkey.asyncio
from valkey.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    ValkeyError,
)
from vllm.logger import init_logger

from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.remote.config import KEY_VALUE_SCHEMES, password_of_valkey
from npu_kvconnector.tiers.remote.hedging import Hedge
from npu_kvconnector.tiers.remote.store import READS, all_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from typing_extensions import Buffer

    from npu_kvconnector.tiers.remote.config import RemoteConfig
    from npu_kvconnector.tiers.remote.store import Record

__all__ = ["ValkeyStore"]

logger = init_logger("vllm.npu_kvconnector")

_WAYS_OUT: dict[type[Exception], str] = {
    AuthenticationError: "set VALKEYCLI_AUTH to the server's password, and name its user in url where it has one",
    NoPermissionError: "let its user run EXISTS, MGET, SET and UNLINK on keys npukv:*",
    OutOfMemoryError: "the server is full: set its maxmemory-policy to allkeys-lru",
    ReadOnlyError: "the server is a replica: name the primary in url",
    ResponseError: "see whether the server has the database that url names",
    ValkeyError: "see whether the server is up, and whether it speaks TLS (valkeys://) or not (valkey://)",
}
_REPLY_BYTES = 8 * 2**20
"""Of a reply, about: several blocks are asked for together, and read while others are on their way."""


class ValkeyStore:
    """A realm's keys in a Valkey or Redis database; the server's ``maxmemory-policy`` says which go when it is full."""

    def __init__(self, config: RemoteConfig, realm: bytes, record_bytes: int) -> None:
        """Open the store without a request.

        Raises:
            OptionError: the client refuses the url or the options.
        """
        self._prefix = b"npukv:" + realm.hex().encode() + b":"
        self._at_a_time = max(_REPLY_BYTES // record_bytes, 1)
        self._milliseconds = None if config.ttl is None else max(int(config.ttl * 1000), 1)
        self._hedge = Hedge(enabled=config.hedge)
        self._client = _open(config)
        self._url, self._deadline = config.url.partition("?")[0], config.deadline
        self._greeting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to see whether the server answers, which nobody waits for."""
        self._greeting = asyncio.create_task(self._greet())

    async def find(self, names: Sequence[bytes]) -> list[bool]:
        """Ask for all names in one round trip."""

        async def request() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(self._prefix + name)
            return list(await pipeline.execute())

        return [bool(found) for found in await self._ask(lambda: self._hedge.read(request), "answer")]

    async def load(self, names: Sequence[bytes], take: Callable[[int, Buffer], Awaitable[None]]) -> None:
        """Read the records that are there, some at a time, and hand them on."""
        reads = asyncio.Semaphore(READS)

        async def load(first: int) -> None:
            async with reads:
                await self._load(first, names[first : first + self._at_a_time], take)

        await all_of(load(first) for first in range(0, len(names), self._at_a_time))

    async def save(self, records: Sequence[Record]) -> None:
        """Write the records, some at a time, and wait for the answers before more are sent."""
        for first in range(0, len(records), self._at_a_time):
            await self._save(records[first : first + self._at_a_time])

    async def forget(self, name: bytes) -> None:
        """Delete a record."""

        async def request() -> None:
            await self._client.unlink(self._prefix + name)

        await self._ask(request, "delete a block")

    async def close(self) -> None:
        """Close all connections."""
        if self._greeting is not None:
            self._greeting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._greeting
        await self._client.aclose()

    async def _greet(self) -> None:
        """Say at once what is wrong; later it is told when the tier leaves the server alone."""
        try:
            async with asyncio.timeout(self._deadline):
                await self.find([b""])
        except StoreError as error:
            logger.warning("The remote tier starts without its store: %s", error)
        except TimeoutError:
            hint = _WAYS_OUT[ValkeyError]
            logger.warning("The remote tier starts without its store: no answer of url=%s: %s", self._url, hint)

    async def _save(self, records: Sequence[Record]) -> None:
        parts = [part for record in records for part in self._command(record)]
        await self._ask(lambda: self._send(parts, len(records)), "save blocks")

    def _command(self, record: Record) -> list[Buffer]:
        """Return what is sent to save a record, in Valkey's protocol; see Note [Sent as it lies]."""
        key, header, payload = self._prefix + record.name, record.header, memoryview(record.payload).cast("B")
        words = [b"SET", key, *([] if self._milliseconds is None else [b"PX", b"%d" % self._milliseconds])]
        size = len(header) + payload.nbytes
        before, after = words[:2], words[2:]
        begin = b"*%d\r\n%s$%d\r\n" % (len(words) + 1, b"".join(map(_bulk, before)), size)
        return [begin + header, payload, b"\r\n" + b"".join(map(_bulk, after))]

    async def _send(self, parts: list[Buffer], answers: int) -> None:
        """Send commands and read their answers; raise the first that is an error, when all were read."""
        pool = self._client.connection_pool
        connection = await pool.get_connection("SET")
        try:
            transport = connection._writer.transport
            _widen(transport.get_extra_info("socket"))
            errors = []
            try:
                await connection.send_packed_command(parts, check_health=False)
                for _ in range(answers):
                    try:
                        await connection.read_response()
                    except ResponseError as error:
                        errors.append(error)
            except BaseException:
                transport.abort()
                await connection.disconnect(nowait=True)
                raise
            if errors:
                raise errors[0]
        finally:
            await pool.release(connection)

    async def _load(self, first: int, names: Sequence[bytes], take: Callable[[int, Buffer], Awaitable[None]]) -> None:
        async def request() -> list[bytes | None]:
            return list(await self._client.mget([self._prefix + name for name in names]))

        records = await self._ask(lambda: self._hedge.read(request), "read blocks")
        if len(records) != len(names) or not all(isinstance(record, bytes | None) for record in records):
            msg = "Valkey answered a question for blocks with something else"
            raise StoreError(msg)
        for number, record in enumerate(records):
            if record is not None:
                await take(first + number, record)

    async def _ask(self, request: Callable[[], Coroutine[Any, Any, Any]], what: str) -> Any:
        try:
            return await request()
        # The last three: its client lets a reply that is none through to Python's own errors.
        except (ValkeyError, OSError, ValueError, TypeError, RecursionError) as error:
            # Not its text: a server may repeat what it was sent.
            hint = next((hint for kind, hint in _WAYS_OUT.items() if isinstance(error, kind)), "see whether it is up")
            msg = f"Valkey at url={self._url} did not {what} ({type(error).__name__}): {hint}"
            raise StoreError(msg) from None


def _widen(sender: socket.socket) -> None:
    """Let a socket take several blocks at once, or both sides wake for each part of one.

    One of TCP finds by itself what it needs, but not once it was told: so only where the system grants as much.
    """
    if sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= _REPLY_BYTES:
        return
    if sender.family is socket.AF_UNIX or _granted() >= _REPLY_BYTES // 2:  # the kernel takes it twice
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REPLY_BYTES)


@functools.cache
def _granted() -> int:
    """Return the most bytes that a program may ask for."""
    try:
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return 0


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _open(config: RemoteConfig) -> Any:
    parts = urlsplit(config.url)
    scheme = KEY_VALUE_SCHEMES[parts.scheme]
    options: dict[str, Any] = {"password": password_of_valkey(), "socket_connect_timeout": config.deadline}
    options["socket_timeout"] = None  # the tier's own deadlines hold; the client's would be 5 seconds
    if parts.username is not None:
        options["username"] = parts.username
    if scheme == "valkeys":
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": config.ca_file}
    try:
        # Beyond so many connections, requests wait for one.
        pool = valkey.asyncio.BlockingConnectionPool.from_url(
            urlunsplit(parts._replace(scheme=scheme)), max_connections=config.concurrency, timeout=None, **options
        )
        return valkey.asyncio.Valkey(connection_pool=pool)
    except (ValkeyError, ValueError, TypeError) as error:
        msg = f"the Valkey server of the remote tier cannot be used: {error}"
        raise OptionError(msg) from None
