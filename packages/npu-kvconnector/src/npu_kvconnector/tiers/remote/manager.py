"""RemoteTierManager: vLLM's interface of a secondary tier over a store of sealed records.

vLLM's scheduler calls the manager and must not wait, so all requests run in one background thread. A block is copied
into the host tier there, between two awaits, after it was verified and only while its job is within its deadline; once
a job is reported nothing writes to its chunks any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from npu_kvconnector.config import GuardConfig
from npu_kvconnector.envelope import HEADER_BYTES, Realm
from npu_kvconnector.errors import IntegrityError, StoreError
from npu_kvconnector.fingerprint import fingerprint
from npu_kvconnector.secret_file import read_secret
from npu_kvconnector.tiers.breaker import CircuitBreaker
from npu_kvconnector.tiers.courtesy import UNHURRIED, Courtesy, shortest
from npu_kvconnector.tiers.remote.background import BackgroundLoop, loop_for_bulk
from npu_kvconnector.tiers.remote.codec import PLAIN, decode, open_codec
from npu_kvconnector.tiers.remote.config import RemoteConfig
from npu_kvconnector.tiers.remote.store import Record, open_store
from npu_kvconnector.tiers.sealed import SealedTier

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping

    from typing_extensions import Buffer
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobId, TransferJob

__all__ = ["RemoteTierManager"]

logger = init_logger("vllm.npu_kvconnector")

_PATIENCE = GuardConfig(failures=3, open_seconds=1.0, max_open_seconds=60.0)
"""When the store is left alone, and every block is a miss at once: the guard's are of the tier, these of the store."""
_OURS = 1 / 3
"""Of the processors' work that a store is, with a server on this host: Valkey takes 0.5 s for a GB, the tier 0.2."""
_NAP = 0.2
"""Seconds after which a long rest is thought over: a store goes on as soon as cores are idle."""
_CLOSING = 5.0
"""Seconds for which shutdown waits for stores under way."""
_COUNTERS = {
    "vllm:npu_kv_remote_dropped_blocks": "Blocks not stored: the queue was full, or the store was left alone.",
    "vllm:npu_kv_remote_rejected_blocks": "Blocks read that were damaged, forged or another's; they were misses.",
    "vllm:npu_kv_remote_late_blocks": "Blocks not loaded in time, or with no room to begin; they were computed.",
    "vllm:npu_kv_remote_failures": "Requests to the store that failed or were late.",
}
_DROPPED, _REJECTED, _LATE, _FAILURES = _COUNTERS
_OPEN = "vllm:npu_kv_remote_left_alone"


class RemoteTierManager(SealedTier):
    """Keeps blocks in an object store or in Valkey; see :class:`RemoteConfig` for the options."""

    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def _start(self, spec: OffloadingSpec, memory: memoryview, options: Mapping[str, Any]) -> None:
        """Open the store; nothing is asked of it yet, so a server starts while its store is down."""
        self._config = RemoteConfig.parse(options)
        self.locality = Locality(self._config.locality)
        self._tells_stores = self._config.enable_kv_events and spec.kv_events_config.enable_kv_cache_events
        self._memory = memory.cast("B")
        config, block_bytes = spec.config, self.block_size_bytes
        model = fingerprint(config, block_bytes=block_bytes, revision=self._config.revision)
        self._realm = Realm(model, self._config.namespace, read_secret(self._config.secret_file))
        self._codec = open_codec(self._config.codec, config.model.dtype)
        self._store = open_store(self._config, self._realm.id, HEADER_BYTES + block_bytes)
        self._breaker = CircuitBreaker(_PATIENCE)
        self._courtesy, self._resting = Courtesy(), asyncio.Lock()
        share = self._config.busy_share * (_OURS if self._config.is_on_this_host else 1)
        self._restraint, self._holding_back = Courtesy(share), asyncio.Lock()
        self._unhurried = UNHURRIED * min(self._config.deadline, shortest(spec.extra_config, "remote", "load_seconds"))
        self._unhurried_store = UNHURRIED * shortest(spec.extra_config, "remote", "store_seconds")
        self._in_hurry = False
        self._silent_until = 0.0  # as long as the last question had no answer
        self._blocks_of_a_pack = -(-self._config.pack_bytes // self.block_size_bytes)  # a full one is sent at once
        self._loads: dict[JobId, Collection[OffloadKey]] = {}
        self._jobs: set[JobId] = set()
        self._pending_bytes = 0
        self._loop = BackgroundLoop("npu-kv-remote", loop_for_bulk)
        self._loop.submit(self._store.start()).result()
        self._lookups = _Lookups(self)
        where, codec = self._config.url.partition("?")[0], self._config.codec
        logger.info("Remote tier: %s, blocks of %d bytes, codec %s", where, block_bytes, codec)

    # --- what the scheduler asks ------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the block is there; RETRY while the store has not answered."""
        if not self._breaker.allows() or not self._is_unique(key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store blocks; they are dropped and counted where the queue is full or the store left alone."""
        if not self._take(job_metadata):
            self._count(_DROPPED, len(job_metadata.keys))
            self._results.put(JobResult(job_metadata.job_id, success=False))
            return
        self._loop.submit(self._run(job_metadata, self._save(job_metadata)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load blocks; they are misses where the queue is full or the store left alone."""
        self._loads[job_metadata.job_id] = job_metadata.keys
        if not self._take(job_metadata):
            self._count(_LATE, len(job_metadata.keys))
            self._results.put(JobResult(job_metadata.job_id, success=False))
            return
        self._loop.submit(self._run(job_metadata, self._load(job_metadata)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs done since the last call; blocks that did not load are misses from now on."""
        finished = list(super().get_finished_jobs())
        for result in finished:
            self._jobs.discard(result.job_id)
            keys = self._loads.pop(result.job_id, None)
            if keys is not None and not result.success:
                loaded = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in keys if key not in loaded])
        return finished

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what the request asked for."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's questions to the store, together."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs, which do not rest meanwhile; each request ends at its deadline at the latest."""
        waited = time.monotonic()
        self._in_hurry = True
        while self._results.qsize() < len(self._jobs):
            if time.monotonic() - waited > 10 * self._config.deadline:
                msg = f"jobs of the remote tier have not ended after {10 * self._config.deadline} s"
                self._in_hurry = False
                raise StoreError(msg)
            time.sleep(0.001)
        self._in_hurry = False

    def shutdown(self) -> None:
        """Let stores under way end for some seconds, then close the store; safe to call twice."""
        self._lookups.shutdown()
        self._in_hurry = True
        until = time.monotonic() + min(_CLOSING, self._config.deadline)
        while self._results.qsize() < len(self._jobs) and time.monotonic() < until:
            time.sleep(0.005)
        self._loop.stop(self._store.close())
        self._memory.release()  # the region's owner closes it next

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's own metrics; bytes, seconds and hits are vLLM's ``vllm:kv_offload_tiering_*``."""
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
        gauge = OffloadingGaugeMetadata(documentation="1 while the store is left alone after failures, else 0.")
        return {**counters, _OPEN: gauge}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        counts = self._take_counts()
        stats = OffloadingConnectorStats()
        for name, number in counts.items():
            stats.increase_counter(name, number)
        stats.set_gauge(_OPEN, 0.0 if self._breaker.allows() else 1.0)
        return stats

    def find_now(self, keys: list[OffloadKey]) -> list[bool]:
        """Wait for :meth:`find`; for the thread of the questions."""
        if not self._breaker.allows():
            return [False] * len(keys)
        return self._loop.submit(self.find(keys)).result()

    # --- in the background thread -----------------------------------------------------------------------------------

    async def find(self, keys: list[OffloadKey]) -> list[bool]:
        """Say for each key whether the store has its block; all are misses where it does not say in time.

        Questions of one step come one after the other: where one has no answer, the others do not wait for theirs.
        """
        self._courtesy.look()
        try:
            if time.monotonic() < self._silent_until:
                raise TimeoutError
            async with asyncio.timeout(self._config.lookup_deadline):
                found = await self._store.find([self._realm.name(key) for key in keys])
        except StoreError as error:
            self._note_failure(error)
            return [False] * len(keys)
        except TimeoutError as error:
            self._silent_until = time.monotonic() + self._config.lookup_deadline
            self._note_failure(error)
            return [False] * len(keys)
        self._breaker.succeed()
        return found

    async def _run(self, job: TransferJob, work: Coroutine[Any, Any, list[OffloadKey]]) -> None:
        """Do a job within its deadline and report it; nothing of it is left running then."""
        began = time.monotonic()
        done: list[OffloadKey] = []
        try:
            done = await work
        except Exception:  # a fault of ours must not leave the job open for ever
            logger.exception("A job of the remote tier failed")
        finally:
            with self._lock:
                self._pending_bytes -= len(job.keys) * self.block_size_bytes
            result = JobResult(
                job.job_id,
                success=len(done) == len(job.keys),
                successful_keys=tuple(done) if job.is_promotion and done else None,
                transfer_time=time.monotonic() - began,
                transfer_bytes=len(done) * self.block_size_bytes,
            )
            self._results.put(result)

    async def _save(self, job: TransferJob) -> list[OffloadKey]:
        """Store the blocks of a job that are not there yet, a pack at a time, each within a deadline."""
        keys, done = list(job.keys), 0
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._config.deadline):
                there = await self._store.find([self._realm.name(key) for key in keys])
            chunks = dict(zip(keys, job.chunk_ids, strict=True))
            missing = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            done = len(keys) - len(missing)
            for pack in _in_packs(missing, self._blocks_of_a_pack):
                await self._hold_back(began + self._unhurried_store * (done + len(pack)) / len(keys))
                async with asyncio.timeout(self._config.deadline):
                    await self._store.save([await self._seal(key, self._chunk(chunks[key])) for key in pack])
                done += len(pack)
        except (StoreError, TimeoutError) as error:
            self._note_failure(error)
            if isinstance(error, StoreError):  # questions that are answered keep the breaker closed
                logger.warning_once("The remote tier cannot store: %s", str(error))
            self._count(_DROPPED, len(keys) - done)
            return []
        self._breaker.succeed()
        if self._tells_stores:
            self._note_stored(keys)
        return keys

    async def _hold_back(self, pace: float) -> None:
        """Rest before more is stored, where cores are short, but not beyond the pace."""
        async with self._holding_back:
            now = time.monotonic()
            until = now + (0.0 if self._in_hurry else self._restraint.rest(pace - now))
            while now < until and not self._in_hurry:
                await asyncio.sleep(min(until - now, _NAP))
                now = time.monotonic()
                if not self._restraint.still_rests():
                    break

    async def _load(self, job: TransferJob) -> list[OffloadKey]:
        keys = list(job.keys)
        loaded: list[OffloadKey] = []
        began, taken = time.monotonic(), itertools.count(1)

        async def take(number: int, record: Buffer) -> None:
            block = await self._open(keys[number], record)
            if block is not None:
                self._chunk(job.chunk_ids[number])[:] = memoryview(block).cast("B")
                loaded.append(keys[number])
            pace = began + self._unhurried * next(taken) / len(keys)
            if time.monotonic() < pace:  # who is late does not wait until others have rested
                async with self._resting:
                    await asyncio.sleep(self._courtesy.rest(pace - time.monotonic()))

        try:
            async with asyncio.timeout(self._config.deadline):
                await self._store.load([self._realm.name(key) for key in keys], take)
        except (StoreError, TimeoutError) as error:
            self._note_failure(error)
            self._count(_LATE, len(keys) - len(loaded))
        else:
            self._breaker.succeed()
        return list(loaded)

    def _chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk of the host tier."""
        start = int(number) * self.block_size_bytes
        return self._memory[start : start + self.block_size_bytes]

    async def _seal(self, key: OffloadKey, block: memoryview) -> Record:
        payload: Buffer | None = None
        if self._codec is not None:
            payload = await asyncio.to_thread(self._codec.encode, block)
        number = PLAIN if payload is None or self._codec is None else self._codec.number
        body = block if payload is None else payload
        header = self._realm.header(key, body, plain_bytes=block.nbytes, codec=number)
        return Record(self._realm.name(key), header, body)

    async def _open(self, key: OffloadKey, record: Buffer) -> Buffer | None:
        """Return the block of a record, or None where it must not be used; such a record is dropped."""
        try:
            payload, number, plain_bytes = self._realm.open(key, record)
            if plain_bytes != self.block_size_bytes:
                msg = f"the record is a block of {plain_bytes} bytes, not {self.block_size_bytes}"
                raise IntegrityError(msg)
            if number == PLAIN:
                return decode(None, number, payload, plain_bytes)
            return await asyncio.to_thread(decode, self._codec, number, payload, plain_bytes)
        except IntegrityError as error:
            logger.warning("The remote tier leaves out a block: %s", error)
            self._count(_REJECTED, 1)
            with contextlib.suppress(StoreError):
                await self._store.forget(self._realm.name(key))
            return None

    # --- counts -----------------------------------------------------------------------------------------------------

    def _take(self, job: TransferJob) -> bool:
        """Say whether the job may begin, and count its bytes as pending."""
        self._jobs.add(job.job_id)
        size = len(job.keys) * self.block_size_bytes
        with self._lock:
            if not self._breaker.allows() or self._pending_bytes + size > self._config.pending_bytes:
                return False
            if not all(self._is_unique(key) for key in job.keys):
                return False
            self._pending_bytes += size
        return True

    def _note_failure(self, error: Exception) -> None:
        self._count(_FAILURES, 1)
        if self._breaker.fail():
            where = self._config.url.partition("?")[0]
            reason = error if isinstance(error, StoreError) else f"{where} does not answer in time"
            logger.warning("The remote tier leaves its store alone for a while: %s", reason)


def _in_packs(keys: list[OffloadKey], most: int) -> Iterator[list[OffloadKey]]:
    return (keys[first : first + most] for first in range(0, len(keys), most))


class _Lookups(AsyncLookupManager):
    """vLLM's bookkeeping of questions under way; its thread waits for ours."""

    def __init__(self, tier: RemoteTierManager) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Ask for the keys of one request."""
        return self._tier.find_now(keys)
