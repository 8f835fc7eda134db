"""Exchange: the half of the tier that runs in its background thread, where blocks go out to peers and come in.

A block is copied into the host tier here, between two awaits, after it was verified and only while its job is open;
once a job has ended nothing writes to its chunks any more.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio
from vllm.logger import init_logger

from npu_kvconnector.envelope import HEADER_BYTES
from npu_kvconnector.errors import IntegrityError, OptionError, StoreError
from npu_kvconnector.p2p.channel import ChannelKeys
from npu_kvconnector.tiers.remote.store import all_of
from npu_kvconnector.tiers.tcp.client import Peer
from npu_kvconnector.tiers.tcp.messages import MOST_ASKED
from npu_kvconnector.tiers.tcp.outbox import Outbox
from npu_kvconnector.tiers.tcp.probe import Probes
from npu_kvconnector.tiers.tcp.server import BlockServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from npu_kvconnector.envelope import Realm
    from npu_kvconnector.tiers.tcp.config import TcpConfig
    from npu_kvconnector.tiers.tcp.params import Source
    from npu_kvconnector.tiers.tcp.probe import Probe
    from npu_kvconnector.tiers.tcp.server import Kind

__all__ = ["Exchange"]

logger = init_logger("vllm.npu_kvconnector")

_PART_BYTES = 4 * 2**20  # of blocks that are asked for, or sealed, at a time
_KEEP_SECONDS = 5.0  # how often peers hear that transfers are still wanted
_MOST_PEERS = 256


class Exchange:
    """Holds blocks for peers and fetches those that they hold; all methods are for one event loop."""

    def __init__(
        self,
        config: TcpConfig,
        secret: bytes,
        realm: Realm,
        kind: Kind,
        memory: memoryview,
        block_bytes: int,
        count: Callable[[str, int], None],
        ring: Callable[[], None],
    ) -> None:
        """Begin without a connection.

        Args:
            config: the tier's options.
            secret: that the servers share.
            realm: names and seals blocks.
            kind: what peers must have in common.
            memory: the host tier, as bytes.
            block_bytes: of a chunk of it.
            count: called with "sent", "dropped", "expired", "rejected", "late" or "failures", and a number.
            ring: lets an engine that has nothing to do take a step.
        """
        self.probes = Probes(max(1, config.pending_bytes // block_bytes), ring)
        self.outbox = Outbox(config.bytes, config.unbound_store_timeout_s)
        self.peers: dict[str, Peer] = {}
        self._deadline = config.deadline
        self._num_threads = config.num_threads
        self._keys = ChannelKeys.derive(secret)
        self._realm = realm
        self._kind = kind
        self._memory = memory
        self._block_bytes = block_bytes
        self._count = count
        self._wanted: dict[str, set[str]] = {}  # peer -> transfers that requests here still want
        self._part = max(1, _PART_BYTES // block_bytes)
        parts = config.pending_bytes // (self._part * block_bytes)
        self._parts = asyncio.Semaphore(max(1, min(parts, MOST_ASKED)))
        self._context: zmq.asyncio.Context | None = None
        self._server: BlockServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self, host: str, port: int) -> None:
        """Begin to answer peers.

        Raises:
            OptionError: the address cannot be listened on.
        """
        self._context = zmq.asyncio.Context(self._num_threads)
        address = f"tcp://{_numeric(host)}:{port}"
        try:
            self._server = BlockServer(
                self._context, address, self._keys, self.outbox, self.probes, self._kind, self._count
            )
        except zmq.ZMQError as error:
            msg = f"the p2p tier cannot listen on {host}:{port} ({error}): set host and port in its options"
            raise OptionError(msg) from error
        self._tasks = [asyncio.create_task(self._server.run()), asyncio.create_task(self._keep())]

    async def shut(self) -> None:
        """End all connections."""
        for peer in self.peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    # --- blocks for peers -------------------------------------------------------------------------------------------

    async def open(self, transfer: str) -> None:
        """Take note of a request that is computed for a peer."""
        self.outbox.open(transfer)

    async def close(self, transfer: str) -> None:
        """Take note that it has ended; its blocks are held until they are fetched, or for a while."""
        self.outbox.close(transfer)

    async def hold(self, job: TransferJob, transfer: str) -> list[OffloadKey]:
        """Seal a job's blocks for a peer; return the keys of those for which there was room."""
        self.outbox.begin(transfer)
        pairs = list(zip(job.keys, job.chunk_ids, strict=True))
        size = HEADER_BYTES + self._block_bytes
        held: list[OffloadKey] = []
        try:
            for first in range(0, len(pairs), self._part):
                part = [pair for pair in pairs[first : first + self._part] if self.outbox.reserve(size)]
                for (key, _), record in zip(part, await asyncio.to_thread(self._seal, part), strict=True):
                    self.outbox.put(transfer, self._realm.name(key), record)
                    held.append(key)
        finally:
            self.outbox.end(transfer)
        if len(held) < len(pairs):
            self._count("dropped", len(pairs) - len(held))
        return held

    async def hold_for(self, job: TransferJob, probe: Probe) -> list[OffloadKey]:
        """Seal a job's blocks for a peer that has asked for what is here."""
        try:
            probe.held.update(await self.hold(job, probe.transfer))
        finally:
            if probe.is_cancelled:
                self.outbox.drop([probe.transfer])
            probe.jobs.discard(job.job_id)
            probe.note()
        return list(job.keys)  # what there was no room for is the peer's loss alone

    async def settle(self, probe: Probe) -> None:
        """Take note that all has been looked up that a peer has asked for."""
        probe.note()

    def _seal(self, part: list[tuple[OffloadKey, int]]) -> list[bytearray]:
        """Return copies of chunks as records; in a thread of its own."""
        records = []
        for key, chunk in part:
            record = bytearray(HEADER_BYTES + self._block_bytes)
            body = memoryview(record)[HEADER_BYTES:]
            body[:] = self._chunk(chunk)
            record[:HEADER_BYTES] = self._realm.header(key, body, plain_bytes=body.nbytes)
            records.append(record)
        return records

    # --- blocks of peers --------------------------------------------------------------------------------------------

    async def want(self, source: Source) -> None:
        """Take note of a request that is to go on from a peer's blocks: the peer is to hold them until then."""
        self._wanted.setdefault(source.address, set()).add(source.transfer)

    async def release(self, source: Source) -> None:
        """Tell the peer, once, that it need not hold the blocks any more."""
        wanted = self._wanted.get(source.address, set())
        if source.transfer in wanted:
            wanted.discard(source.transfer)
            if not wanted:
                del self._wanted[source.address]
            await self._peer(source).done([source.transfer])

    async def find(self, source: Source, keys: Sequence[OffloadKey]) -> list[bool]:
        """Say for each key whether the peer has its block; it has none if it does not say so."""
        try:
            if source.is_probe:
                await self.want(source)
                return await self._peer(source).probe(source.transfer, keys)
            return await self._peer(source).find(source.transfer, [self._realm.name(key) for key in keys])
        except StoreError:  # counted, and logged
            return [False] * len(keys)
        except Exception:  # a fault of ours must not leave the question open for ever
            logger.exception("A question of the p2p tier failed")
            return [False] * len(keys)

    async def fetch(self, job: TransferJob, source: Source) -> list[OffloadKey]:
        """Fetch a job's blocks into its chunks, in parts; after the first failure no more are asked for.

        Returns:
            The keys of those that came and are what they should be.
        """
        pairs = list(zip(job.keys, job.chunk_ids, strict=True))
        loaded: list[OffloadKey] = []
        failed = asyncio.Event()

        async def fetch(part: list[tuple[OffloadKey, int]]) -> None:
            async with self._parts:
                if failed.is_set():
                    return
                try:
                    records = await self._peer(source).get(source.transfer, [self._realm.name(key) for key, _ in part])
                except StoreError:  # counted, and logged
                    failed.set()
                    return
                loaded.extend(self._take(part, records, source))

        await all_of(fetch(pairs[first : first + self._part]) for first in range(0, len(pairs), self._part))
        if len(loaded) < len(pairs):
            self._count("late", len(pairs) - len(loaded))
        return loaded

    def _take(self, part: list[tuple[OffloadKey, int]], records: list[Buffer], source: Source) -> list[OffloadKey]:
        """Copy those blocks into the host tier that are what they should be; return their keys."""
        taken = []
        for (key, chunk), record in zip(part, records, strict=True):
            if not memoryview(record).nbytes:  # it has gone meanwhile
                continue
            try:
                payload, codec, plain_bytes = self._realm.open(key, record)
                if codec or plain_bytes != self._block_bytes or payload.nbytes != plain_bytes:
                    msg = f"the record is a block of {plain_bytes} bytes in codec {codec}"
                    raise IntegrityError(msg)
            except IntegrityError as error:
                self._count("rejected", 1)
                self._peer(source).fail(f"a block of it must not be used: {error}")
                continue
            self._chunk(chunk)[:] = payload
            taken.append(key)
        return taken

    async def _keep(self) -> None:
        """Tell peers now and then what is still wanted."""
        while True:
            await asyncio.sleep(_KEEP_SECONDS)
            wanted = [(self.peers[address], names) for address, names in self._wanted.items() if address in self.peers]
            told = await asyncio.gather(*(peer.keep(names) for peer, names in wanted), return_exceptions=True)
            for error in told:
                if isinstance(error, Exception):  # one peer's fault must not end this for all
                    logger.warning("A peer could not be told what is wanted: %r", error)

    def _peer(self, source: Source) -> Peer:
        """Return the peer, which is among those allowed."""
        if source.address not in self.peers:
            if len(self.peers) >= _MOST_PEERS:  # clients may name any port of a host that is allowed
                oldest = next(iter(self.peers))
                self.peers.pop(oldest).close()
            assert self._context is not None
            self.peers[source.address] = Peer(
                self._context,
                source.address,
                self._keys,
                self._kind,
                connections=self._num_threads,
                deadline=self._deadline,
                block_bytes=HEADER_BYTES + self._block_bytes,
                note=lambda: self._count("failures", 1),
            )
        return self.peers[source.address]

    def _chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk of the host tier."""
        start = int(number) * self._block_bytes
        return self._memory[start : start + self._block_bytes]


def _numeric(host: str) -> str:
    """Return a host's numeric address, which ZeroMQ listens on."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        msg = f"the p2p tier's host {host!r} has no address: {error}"
        raise OptionError(msg) from error
