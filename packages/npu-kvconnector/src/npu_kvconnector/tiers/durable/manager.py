"""DurableTierManager: vLLM's interface of a secondary tier over a store on a local disk.

vLLM's scheduler calls the manager and must not wait: questions are answered from the index, which is in memory, and
blocks are stored and loaded in threads. A block is read into memory of the thread, verified there, and only then copied
into the host tier. Where another process writes the store, this one reads it, and becomes the writer when that ends.

Note [A start on a disk that hangs]. The store is opened in the thread that stores, for which a start waits for
`silent_seconds`. After that the server starts without the tier: nothing is found, and stores fail, which opens the
guard's breaker. The thread goes on, whatever it takes, and tries again where the store cannot be opened. A disk without
room, which others may have filled, is taken likewise, at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)
from vllm.v1.kv_offload.tiering.base import JobResult

from npu_kvconnector.envelope import Realm
from npu_kvconnector.errors import IntegrityError, StoreError
from npu_kvconnector.fingerprint import describe
from npu_kvconnector.secret_file import read_secret
from npu_kvconnector.tiers.courtesy import STORING, UNHURRIED, Courtesy, shortest
from npu_kvconnector.tiers.durable.cipher import OVERHEAD, Cipher
from npu_kvconnector.tiers.durable.config import DurableConfig
from npu_kvconnector.tiers.durable.envelope import AES_GCM, PLAIN, record_bytes
from npu_kvconnector.tiers.durable.files import page_buffer
from npu_kvconnector.tiers.durable.lock import StoreBusyError, StoreFullError, lock_store
from npu_kvconnector.tiers.durable.reader import LOOK_AGAIN, StoreReader
from npu_kvconnector.tiers.durable.store import DurableStore, Record
from npu_kvconnector.tiers.durable.threads import DaemonPool
from npu_kvconnector.tiers.priority import step_back
from npu_kvconnector.tiers.sealed import RefusedJob, SealedTier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.base import JobId, TransferJob

__all__ = ["DurableTierManager"]

logger = init_logger("vllm.npu_kvconnector")

_TRY_AGAIN = 10.0  # seconds between attempts to become the writer, or to write again after a failure
_MOST_TOUCHES = 1024  # notes of uses that wait
_STARTING = 60.0  # seconds that another server may take to bring the store in order
_COUNTERS = {
    "vllm:npu_kv_durable_stored_blocks": "Blocks stored.",
    "vllm:npu_kv_durable_loaded_blocks": "Blocks loaded, each verified.",
    "vllm:npu_kv_durable_dropped_blocks": "Blocks not stored: the queue was full, the store failed or is another's.",
    "vllm:npu_kv_durable_corrupt_blocks": "Blocks read that were not what had been stored; they were computed.",
    "vllm:npu_kv_durable_unreadable_blocks": "Blocks that the disk did not give back; they were computed.",
    "vllm:npu_kv_durable_evicted_blocks": "Blocks removed to make room.",
    "vllm:npu_kv_durable_lost_blocks": "Blocks that could not be made durable.",
}
_STORED, _LOADED, _DROPPED, _CORRUPT, _UNREADABLE, _EVICTED, _LOST = _COUNTERS
_GAUGES = {
    "vllm:npu_kv_durable_blocks": "Blocks in the store.",
    "vllm:npu_kv_durable_bytes": "Bytes of the store's segments.",
    "vllm:npu_kv_durable_is_writer": "1 where this server writes the store, 0 where it reads another's.",
}
_BLOCKS, _BYTES, _IS_WRITER = _GAUGES
_WRITE_BYTES, _MOST_OF_A_WRITE = 8 * 2**20, 64
"""Of blocks that are stored together: where cores are short, the thread waits for one after each write."""
_DELAY = "vllm:npu_kv_durable_delay_seconds"
_DELAYS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 30.0)
_FOLLOWER = "npu-kv-durable-follow"
_UNHURRIED_SYNC = 0.4
"""Of `sync_seconds`, for which a store may go slowly where cores are short; the commit begins after half of them."""


@dataclasses.dataclass(slots=True)
class _Job:
    """A load under way."""

    keys: list[OffloadKey]
    began: float
    left: int
    loaded: list[OffloadKey] = dataclasses.field(default_factory=list)


class DurableTierManager(SealedTier):
    """Keeps blocks in a store on a disk; see :class:`DurableConfig` for the options."""

    silent_seconds = 30.0
    """Without an answer of the disk, after which nobody waits for it."""

    def _start(self, spec: OffloadingSpec, memory: memoryview, options: Mapping[str, Any]) -> None:
        """Open the store and bring it in order, or read it where another process writes it.

        Raises:
            OptionError: an option is wrong, or the folder cannot be used.
            StoreError: the store cannot be brought in order.
        """
        self._config = DurableConfig.parse(options)
        self.locality = Locality(self._config.locality)
        self._tells_stores = self._config.enable_kv_events and spec.kv_events_config.enable_kv_cache_events
        self._memory = np.frombuffer(memory, dtype=np.uint8).reshape(-1, self.block_size_bytes)
        # Chunks that wait to be stored cannot be evicted meanwhile: some are left for blocks that are loaded.
        self._limit = max(16, len(self._memory) * 3 // 4)
        about = describe(spec.config, block_bytes=self.block_size_bytes, revision=self._config.revision)
        about["encrypted"] = self._config.encrypt
        self._about = {"model": spec.config.model.name, "namespace": self._config.namespace, **about}
        secret = read_secret(self._config.secret_file)
        fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
        self._realm = Realm(fingerprint, self._config.namespace, secret)
        self._cipher = Cipher(secret, self._realm.id) if self._config.encrypt else None
        self._payload_bytes = self.block_size_bytes + (OVERHEAD if self._cipher else 0)
        self._blocks_of_a_write = max(1, min(_WRITE_BYTES // self._payload_bytes, _MOST_OF_A_WRITE))
        self._store: StoreReader | None = None
        self._idle = threading.Condition(self._lock)
        self._jobs: dict[JobId, _Job] = {}
        self._stores = 0
        self._waiting = 0
        self._seen: dict[str, int] = {}
        self._buffers = threading.local()
        self._loading: list[int] = []  # the threads that load
        self._courtesy, self._resting = Courtesy(worked=lambda: _seconds_of(self._loading)), threading.Lock()
        self._restraint, self._hurry = Courtesy(STORING), threading.Event()
        self._unhurried = UNHURRIED * shortest(spec.extra_config, "durable", "load_seconds")
        slowly = UNHURRIED * shortest(spec.extra_config, "durable", "store_seconds")
        self._unhurried_store = min(slowly, _UNHURRIED_SYNC * self._config.sync_seconds)
        self._moves = 0  # what has come back from the disk
        self._touches = 0
        self._is_shut, self._ends = False, threading.Event()
        self._storer = DaemonPool(1, "npu-kv-durable-store", step_back)
        try:
            self._open_in_time()
        except BaseException:
            self._storer.shutdown(time.monotonic())
            raise
        self._tried = time.monotonic()
        self._loaders = DaemonPool(self._config.threads, "npu-kv-durable-load", self._begin_loading)

    # --- what the scheduler asks ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the block is there."""
        store = self._store
        if store is None or not self._is_unique(key):
            return LookupResult.MISS
        return LookupResult.HIT if self._realm.name(key) in store else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store blocks; where too many wait, the last of them are dropped and counted."""
        keys = list(job_metadata.keys)
        may_be_stored = self._store is not None and all(self._is_unique(key) for key in keys)
        with self._lock:
            room = self._limit - self._waiting if self._waiting else len(keys)
            taken = keys[: max(room, 0)] if may_be_stored else []
            self._waiting += len(taken)
            self._stores += bool(taken)
        self._count(_DROPPED, len(keys) - len(taken))
        if not taken:
            self._results.put(JobResult(job_metadata.job_id, success=False))
            return
        chunks = list(job_metadata.chunk_ids)[: len(taken)]
        self._storer.submit(self._save, job_metadata.job_id, taken, chunks, time.monotonic(), is_whole=taken == keys)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load blocks."""
        keys = list(job_metadata.keys)
        job = _Job(keys, time.monotonic(), len(keys))
        with self._lock:
            self._jobs[job_metadata.job_id] = job
        for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True):
            self._loaders.submit(self._load, job_metadata.job_id, job, key, int(chunk))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep blocks that were used for longer; noted in the background."""
        if self._touches >= _MOST_TOUCHES:  # a disk that does not answer
            return
        names = [self._realm.name(key) for key in keys]
        with contextlib.suppress(RuntimeError):  # after shutdown
            self._storer.submit(self._touch, names)
            with self._lock:
                self._touches += 1

    def drain_jobs(self) -> None:
        """Wait for all jobs, which do not rest meanwhile.

        Raises:
            StoreError: the disk has not answered for some seconds.
        """
        self._hurry.set()
        is_done = self._wait_for_jobs()
        self._hurry.clear()
        if not is_done:
            raise StoreError(self._silence())

    def shutdown(self) -> None:
        """Let jobs under way end, make all durable, and close the store; safe to call twice.

        Raises:
            StoreError: the disk has not answered for some seconds; it may still read what a job was to store.
        """
        if self._is_shut:
            return
        self._is_shut = True
        self._hurry.set()
        self._ends.set()
        was_open = self._store is not None
        # In the thread that stores: who shuts an engine down must not hang with a disk.
        self._storer.submit(self._close)
        is_done = self._wait_for_jobs()
        until = time.monotonic() + (self.silent_seconds if is_done and was_open else 0.0)
        if not all([self._loaders.shutdown(until), self._storer.shutdown(until)]) and was_open:
            raise StoreError(self._silence())
        self._memory = np.empty((0, self.block_size_bytes), np.uint8)  # the region's owner closes it next
        self._primary_kv_view = memoryview(b"")

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()  # the one that there is after all jobs

    def _wait_for_jobs(self) -> bool:
        """Wait until there are none; return False where nothing came from the disk for so long."""
        moves, since = self._moves, time.monotonic()
        with self._idle:
            while self._jobs or self._stores:
                self._idle.wait(0.1)
                if self._moves != moves:
                    moves, since = self._moves, time.monotonic()
                elif time.monotonic() - since > self.silent_seconds:
                    return False
        return True

    def _silence(self) -> str:
        return f"the disk of {self._config.path} has not answered for {self.silent_seconds:.0f} s: see the system's log"

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's own metrics; bytes, seconds and hits are vLLM's ``vllm:kv_offload_tiering_*``."""
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
        gauges = {name: OffloadingGaugeMetadata(documentation=text) for name, text in _GAUGES.items()}
        text = "Seconds after a block was handed to the tier until it was durable."
        return {**counters, **gauges, _DELAY: OffloadingHistogramMetadata(documentation=text, buckets=_DELAYS)}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call, and what there is now."""
        store = self._store
        totals = {_CORRUPT: store.corrupt, _UNREADABLE: store.unreadable} if store is not None else {}
        if isinstance(store, DurableStore):
            totals |= {_EVICTED: store.evicted, _LOST: store.lost, _STORED: store.stored}
        counts = self._take_counts()
        for name, total in totals.items():
            counts[name] = counts.get(name, 0) + max(total - self._seen.get(name, 0), 0)
        self._seen = totals
        stats = OffloadingConnectorStats()
        for name, number in counts.items():
            if number:
                stats.increase_counter(name, number)
        for seconds in store.take_delays() if isinstance(store, DurableStore) else ():
            stats.observe_histogram(_DELAY, seconds)
        is_writer = isinstance(store, DurableStore) and store.failure is None
        stats.set_gauge(_IS_WRITER, float(is_writer))
        with contextlib.suppress(Exception):  # a store that is being closed
            stats.set_gauge(_BLOCKS, float(len(store.index) if store is not None else 0))
            if isinstance(store, DurableStore):
                stats.set_gauge(_BYTES, float(store.segment_bytes_on_disk))
        return stats

    # --- in the threads ---------------------------------------------------------------------------------------------

    def _save(
        self, job_id: JobId, keys: list[OffloadKey], chunks: Iterable[int], asked: float, *, is_whole: bool
    ) -> None:
        """Store the blocks of a job of that time, which are all of them where it is whole."""
        began, done, end = time.monotonic(), 0, JobResult
        try:
            store = self._writer()
            if store is None and self._is_reader():
                end = RefusedJob
            pairs = list(zip(keys, chunks, strict=True)) if store is not None else []
            for first in range(0, len(pairs), self._blocks_of_a_write):
                # Other jobs may wait behind this one, and have the same time.
                pace = asked + self._unhurried_store * first / max(self._waiting, 1)
                self._hurry.wait(self._restraint.rest(pace - time.monotonic()))
                some = pairs[first : first + self._blocks_of_a_write]
                if store is not None and self._put(store, some, asked):
                    done += len(some)
                self._moves += 1
        except Exception:  # a fault of ours must not leave the job open for ever
            logger.exception("A store of the durable tier failed")
        finally:
            self._count(_DROPPED, len(keys) - done)
            if self._tells_stores and done == len(keys):
                self._note_stored(keys)
            seconds, size = time.monotonic() - began, done * self.block_size_bytes
            is_stored = is_whole and done == len(keys)
            self._results.put(end(job_id, success=is_stored, transfer_time=seconds, transfer_bytes=size))
            with self._idle:
                self._waiting -= len(keys)
                self._stores -= 1
                self._idle.notify_all()

    def _put(self, store: DurableStore, blocks: Iterable[tuple[OffloadKey, int]], came: float) -> bool:
        try:
            named = [(self._realm.name(key), self._memory[int(chunk)]) for key, chunk in blocks]
            store.put_all([self._record(name, block, came) for name, block in named if name not in store])
        except StoreError as error:
            logger.warning_once("The durable tier cannot store: %s", str(error))
            return False
        return True

    def _record(self, name: bytes, block: np.ndarray, came: float) -> Record:
        payload = block.data if self._cipher is None else self._cipher.encrypt(name, block.data)
        codec = PLAIN if self._cipher is None else AES_GCM
        return Record(name, self._realm.id, memoryview(payload), block.nbytes, codec, came)

    def _begin_loading(self) -> None:
        step_back()
        self._loading.append(threading.get_ident())

    def _rest(self, pace: float) -> None:
        """Rest, all threads that load together, where cores are short; who is behind the pace does not."""
        if time.monotonic() < pace:
            with self._resting:
                self._hurry.wait(self._courtesy.rest(pace - time.monotonic()))

    def _load(self, job_id: JobId, job: _Job, key: OffloadKey, chunk: int) -> None:
        """Load one block of a job; the last one reports it."""
        is_loaded = False
        try:
            self._rest(job.began + self._unhurried * (len(job.keys) - job.left) / len(job.keys))
            is_loaded = self._read(self._realm.name(key), self._memory[chunk])
        except Exception:  # a fault of ours must not leave the job open for ever
            logger.exception("A load of the durable tier failed")
        finally:
            with self._lock:
                self._moves += 1
                if is_loaded:
                    job.loaded.append(key)
                job.left -= 1
                is_last = job.left == 0
            if is_last:
                self._report(job_id, job)

    def _report(self, job_id: JobId, job: _Job) -> None:
        self._count(_LOADED, len(job.loaded))
        self._results.put(
            JobResult(
                job_id,
                success=len(job.loaded) == len(job.keys),
                successful_keys=tuple(job.loaded) or None,
                transfer_time=time.monotonic() - job.began,
                transfer_bytes=len(job.loaded) * self.block_size_bytes,
            )
        )
        with self._idle:
            del self._jobs[job_id]
            self._idle.notify_all()

    def _read(self, name: bytes, target: np.ndarray) -> bool:
        """Copy a block to its chunk once it is verified."""
        buffer = getattr(self._buffers, "memory", None)
        if buffer is None:
            buffer = self._buffers.memory = page_buffer(record_bytes(self._payload_bytes))
        store = self._store
        block = store.read(name, buffer) if store is not None else None
        if store is None or block is None:
            return False
        payload: memoryview | bytes = block.payload
        try:
            if (block.header.codec == AES_GCM) != (self._cipher is not None):
                msg = "the block is stored in another codec than this tier's"
                raise IntegrityError(msg)
            if self._cipher is not None:
                payload = self._cipher.decrypt(name, block.payload)
            if len(payload) != target.nbytes:
                msg = f"the block has {len(payload)} bytes, not {target.nbytes}"
                raise IntegrityError(msg)
        except IntegrityError as error:
            logger.warning("The durable tier leaves out a block: %s", error)
            store.discard(name, str(error))
            return False
        np.copyto(target, np.frombuffer(payload, dtype=np.uint8))
        return True

    def _touch(self, names: list[bytes]) -> None:
        with self._lock:
            self._touches -= 1
        store = self._store
        if isinstance(store, DurableStore):
            with contextlib.suppress(Exception):
                for name in names:
                    store.touch(name)

    # --- the store --------------------------------------------------------------------------------------------------

    def _open_in_time(self) -> None:
        """Have the store opened, and wait for it; see Note [A start on a disk that hangs].

        Raises:
            OptionError: the folder cannot be used.
            StoreError: the store cannot be brought in order.
        """
        first: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._storer.submit(self._open_at_last, first)
        concurrent.futures.wait([first], self.silent_seconds)
        if first.cancel():
            hint = "the server starts without the durable tier, which is used as soon as its store is open"
            logger.warning("%s; %s", self._silence(), hint)
        else:
            first.result()

    def _open_at_last(self, first: concurrent.futures.Future[None]) -> None:
        """Open the store; where nobody waits for that any more, try again until it works."""
        said = ""
        while not self._is_shut:
            try:
                self._store = self._open()
            except Exception as error:  # noqa: BLE001  # told to who waits
                if isinstance(error, StoreFullError):
                    _tell(first)  # the server starts without it
                elif _tell(first, error):
                    return
                if str(error) != said:
                    logger.warning("The durable tier cannot open its store, and tries again: %s", error)
                said = str(error)
                self._ends.wait(_TRY_AGAIN)
            else:
                if not _tell(first):
                    logger.warning("The store in %s is open: the durable tier is used now", self._config.path)
                return

    def _follow(self, reader: StoreReader) -> None:
        """Follow the writer of the store that is read, as long as it is."""
        while not self._ends.wait(LOOK_AGAIN) and self._store in {None, reader}:
            reader.follow()

    def _open(self) -> StoreReader:
        """Return the store as its writer, or as a reader where another process writes it."""
        path, direct, policy = Path(self._config.path), self._config.direct, self._config.eviction_policy
        until = time.monotonic() + _STARTING
        while True:
            try:
                store = DurableStore(
                    path,
                    quota=self._config.bytes,
                    block_bytes=self._payload_bytes,
                    direct=direct,
                    commit_seconds=self._config.sync_seconds / 2,
                    eviction_policy=policy,
                )
                break
            except StoreBusyError as error:
                try:
                    reader = StoreReader(path, direct=direct)
                except StoreError:
                    # Of servers that start together, the first is still making the store.
                    if time.monotonic() > until or self._ends.wait(0.1):
                        raise
                    continue
                logger.warning("The durable tier only reads, %s", error)
                threading.Thread(target=self._follow, args=(reader,), name=_FOLLOWER, daemon=True).start()
                return reader
        room = shutil.disk_usage(path).free + store.bytes_on_disk()
        if self._config.bytes > room:
            hint = "blocks go as soon as the disk is full; lower bytes, or make room"
            logger.warning("Durable tier: bytes=%d, but %s has room for %d: %s", self._config.bytes, path, room, hint)
        store.describe_realm(self._realm.id, self._about)
        found = store.recovered
        logger.info(
            "Durable tier in %s: %d blocks, %d of them found behind the index%s; %s",
            path,
            len(store.index),
            found.adopted,
            ", which was made again" if found.was_rebuilt else "",
            "past the page cache" if store.is_direct else "through the page cache",
        )
        return store

    def _is_reader(self) -> bool:
        """Return whether another process writes the store, as far as is known."""
        return self._store is not None and not isinstance(self._store, DurableStore)

    def _writer(self) -> DurableStore | None:
        """Return the store if this process may write it; now and then try to become the writer."""
        store = self._store
        if isinstance(store, DurableStore) and store.failure is None:
            return store
        if time.monotonic() - self._tried < _TRY_AGAIN:
            return None
        self._tried = time.monotonic()
        try:
            if isinstance(store, DurableStore):
                logger.warning("The durable tier opens its store again: %s", store.failure)
                store.abandon()
            else:
                os.close(lock_store(Path(self._config.path)))  # is it free?
            fresh = self._open()
        except StoreBusyError:
            return None
        except (StoreError, OSError) as error:
            logger.warning("The durable tier cannot open its store: %s", error)
            return None
        self._store = fresh  # the old one is closed by its last user: loads may be reading it
        return fresh if isinstance(fresh, DurableStore) else None  # another process was quicker, and is read from


def _tell(waited_for: concurrent.futures.Future[None], error: Exception | None = None) -> bool:
    """Tell how it ended; return False where nobody waits any more."""
    try:
        if error is None:
            waited_for.set_result(None)
        else:
            waited_for.set_exception(error)
    except concurrent.futures.InvalidStateError:
        return False
    return True


def _seconds_of(threads: Iterable[int]) -> float:
    """Return for how long these threads of this process have worked, together."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in threads)
