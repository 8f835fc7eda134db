"""TcpTierManager: vLLM's interface of a secondary tier over peers: blocks for others go out, those of others come in.

vLLM's scheduler calls the manager and must not wait, so whatever waits is done in one background thread, by Exchange.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, ClassVar

import vllm.envs as vllm_envs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from npu_kvconnector.compat import engine_bell
from npu_kvconnector.envelope import Realm
from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.fingerprint import describe, fingerprint
from npu_kvconnector.tiers.remote.background import BackgroundLoop
from npu_kvconnector.tiers.sealed import SealedTier
from npu_kvconnector.tiers.tcp.config import TcpConfig
from npu_kvconnector.tiers.tcp.exchange import Exchange
from npu_kvconnector.tiers.tcp.params import Destination, Source, destination_of, params_for, source_of
from npu_kvconnector.tiers.tcp.server import Kind

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping
    from concurrent.futures import Future

    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobId, ParentManager, TransferJob

    from npu_kvconnector.tiers.tcp.probe import Probe

__all__ = ["TcpTierManager"]

logger = init_logger("vllm.npu_kvconnector")

_MOST_REFUSALS = 1000  # lines of log
_COUNTERS = {
    "vllm:npu_kv_p2p_sent_blocks": "Blocks sent to peers that asked for them.",
    "vllm:npu_kv_p2p_dropped_blocks": "Blocks not held for peers: there was no room for them.",
    "vllm:npu_kv_p2p_expired_blocks": "Blocks held for peers of which none asked for them in time.",
    "vllm:npu_kv_p2p_rejected_blocks": "Blocks of peers that were damaged, forged or another's; they were computed.",
    "vllm:npu_kv_p2p_late_blocks": "Blocks of peers that were found and did not come in time; they were computed.",
    "vllm:npu_kv_p2p_failures": "Questions to peers that failed or were late.",
}
_NOTED = {name.removeprefix("vllm:npu_kv_p2p_").removesuffix("_blocks"): name for name in _COUNTERS}
_HELD = "vllm:npu_kv_p2p_held_bytes"


class TcpTierManager(SealedTier):
    """Takes a prompt's blocks over from the server that computed it; see :class:`TcpConfig` for the options."""

    medium: ClassVar[None] = None  # type: ignore[assignment]  # as of vLLM's p2p tier
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P

    def _start(self, spec: OffloadingSpec, memory: memoryview, options: Mapping[str, Any]) -> None:
        """Listen for peers; none of them is asked for anything yet."""
        self._config = config = TcpConfig.parse(options)
        self.locality = Locality.REMOTE
        self._access = config.access
        secret = self._access.secret()
        self._memory = memory.cast("B")
        block_bytes = self.block_size_bytes
        model = fingerprint(spec.config, block_bytes=block_bytes, revision=config.revision)
        realm = Realm(model, config.namespace, secret)
        description = describe(spec.config, block_bytes=block_bytes, revision=config.revision)
        kind = Kind(realm.id, json.dumps(description, sort_keys=True), get_none_hash_seed)
        self._host = vllm_envs.VLLM_P2P_SIDE_CHANNEL_HOST if config.host is None else config.host
        base = vllm_envs.VLLM_P2P_SIDE_CHANNEL_PORT if config.port is None else config.port
        self._port = base + spec.config.parallel.data_parallel_index
        self._questions: dict[str, _Question] = {}
        self._jobs: set[JobId] = set()
        self._refused: set[tuple[str, int]] = set()
        self._exchange = Exchange(
            config,
            secret,
            realm,
            kind,
            self._memory,
            block_bytes,
            lambda what, number: self._count(_NOTED[what], number),
            engine_bell(),
        )
        self._loop = BackgroundLoop("npu-kv-p2p")
        try:
            self._loop.submit(self._exchange.listen(self._host, self._port)).result()
        except OptionError:
            self.shutdown()
            raise
        logger.info(
            "P2P tier: blocks of %d bytes over TCP, encrypted, from %s:%d to who holds the secret; read from %s",
            block_bytes,
            self._host,
            self._port,
            ", ".join(config.peers) or "nobody",
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Take note of what is to be read from a peer, or held for one; for that, all blocks are asked for."""
        params = req_context.kv_transfer_params
        source = source_of(params)
        if source is not None and self._may_read(source):
            req_context.set_state(source)
            if not source.is_probe:  # that peer holds nothing yet
                self._loop.submit(self._exchange.want(source))
        destination = destination_of(params)
        if destination is None:
            return RequestOffloadingContext()
        req_context.set_state(destination)
        self._loop.submit(self._exchange.open(destination.transfer))
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def transfer_params(self, req_context: ReqContext) -> dict[str, Any] | None:
        """Return what the answer to a request says of its blocks: where a decode server may fetch them."""
        destination = req_context.get_state(Destination)
        if destination is None or not destination.tells:
            return None
        return params_for(destination.transfer, self._host, self._port)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether the peer has the block; RETRY while it has not answered."""
        source = req_context.get_state(Source)
        if source is None or not self._is_unique(key):
            return LookupResult.MISS
        question = self._questions.setdefault(req_context.req_id, _Question(source))
        found = question.answer(key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Hold the blocks of a request that is computed for a peer; those of others are none of this tier's."""
        job_id = job_metadata.job_id
        destination = job_metadata.req_context.get_state(Destination)
        if destination is None:
            self._results.put(JobResult(job_id, success=True, transfer_time=0.0, transfer_bytes=0))
        elif not all(self._is_unique(key) for key in job_metadata.keys):
            self._results.put(JobResult(job_id, success=False))
        else:
            self._loop.submit(self._run(job_metadata, self._exchange.hold(job_metadata, destination.transfer)))
        self._jobs.add(job_id)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to fetch blocks from the peer."""
        self._jobs.add(job_metadata.job_id)
        source = job_metadata.req_context.get_state(Source)
        if source is None:
            self._results.put(JobResult(job_metadata.job_id, success=False))
            return
        self._loop.submit(self._run(job_metadata, self._exchange.fetch(job_metadata, source)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs done since the last call."""
        finished = list(super().get_finished_jobs())
        jobs = [result.job_id for result in finished]
        self._jobs.difference_update(jobs)
        self._exchange.probes.end(jobs)
        return finished

    def has_pending_work(self) -> bool:
        """Return whether a peer waits for an answer that takes a step."""
        return self._exchange.probes.is_waiting

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Look up what peers ask for that was not computed for them."""
        self._exchange.probes.serve(parent, self._seal_for, self._settle)

    def decline_external_requests(self, parent: ParentManager) -> None:
        """Let peers go on without what they ask for: looking it up has failed too often, says the guard."""
        self._exchange.probes.decline(parent, self._settle)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's questions, those of a request together; requests that run want nothing more."""
        for request in context.new_req_ids:
            self._end_question(request)
        for question in self._questions.values():
            keys = question.take_new()
            if keys:
                question.wait_for(keys, self._loop.submit(self._exchange.find(question.source, keys)))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; what is held for a peer stays until it is fetched."""
        self._end_question(req_context.req_id)
        source, destination = req_context.get_state(Source), req_context.get_state(Destination)
        if source is not None:
            self._loop.submit(self._exchange.release(source))
        if destination is not None:
            self._loop.submit(self._exchange.close(destination.transfer))

    def drain_jobs(self) -> None:
        """Wait for all jobs; each part of one ends at its deadline at the latest."""
        waited, most = time.monotonic(), 10 * self._config.deadline
        while self._results.qsize() < len(self._jobs):
            if time.monotonic() - waited > most:
                msg = f"jobs of the p2p tier have not ended after {most} s"
                raise StoreError(msg)
            time.sleep(0.001)

    def shutdown(self) -> None:
        """Stop listening and asking; safe to call twice."""
        self._loop.stop(self._exchange.shut())
        self._memory.release()  # the region's owner closes it next

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's own metrics; bytes, seconds and hits are vLLM's ``vllm:kv_offload_tiering_*``."""
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
        return {**counters, _HELD: OffloadingGaugeMetadata(documentation="Bytes of blocks held for peers.")}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        stats = OffloadingConnectorStats()
        for name, number in self._take_counts().items():
            stats.increase_counter(name, number)
        stats.set_gauge(_HELD, float(self._exchange.outbox.used_bytes))
        return stats

    def _may_read(self, source: Source) -> bool:
        if self._access.allows(source.host, source.port):
            return True
        if (source.host, source.port) not in self._refused and len(self._refused) < _MOST_REFUSALS:
            self._refused.add((source.host, source.port))
            logger.warning("A request is to be read from %s, which is not among the peers: computed", source.address)
        return False

    def _seal_for(self, job: TransferJob, probe: Probe) -> None:
        self._jobs.add(job.job_id)
        self._loop.submit(self._run(job, self._exchange.hold_for(job, probe)))

    def _settle(self, probe: Probe) -> None:
        self._loop.submit(self._exchange.settle(probe))

    def _end_question(self, request: str) -> None:
        question = self._questions.pop(request, None)
        if question is not None:
            self._loop.submit(self._exchange.release(question.source))

    async def _run(self, job: TransferJob, work: Coroutine[Any, Any, list[OffloadKey]]) -> None:
        """Do a job and report it; nothing of it is left running then."""
        began = time.monotonic()
        done: list[OffloadKey] = []
        try:
            done = await work
        except Exception:  # a fault of ours must not leave the job open for ever
            logger.exception("A job of the p2p tier failed")
        finally:
            result = JobResult(
                job.job_id,
                success=len(done) == len(job.keys),
                successful_keys=tuple(done) if job.is_promotion and done else None,
                transfer_time=time.monotonic() - began,
                transfer_bytes=len(done) * self.block_size_bytes,
            )
            self._results.put(result)


class _Question:
    """What a request has asked its peer; of the scheduler's thread."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._answers: dict[OffloadKey, bool | None] = {}
        self._new: list[OffloadKey] = []
        self._asked: list[tuple[list[OffloadKey], Future[list[bool]]]] = []

    def answer(self, key: OffloadKey) -> bool | None:
        """Return whether the block is there, None where that is not known; it is asked for then."""
        if key not in self._answers:
            self._answers[key] = None
            self._new.append(key)
        if self._answers[key] is None:
            self._collect()
        return self._answers[key]

    def take_new(self) -> list[OffloadKey]:
        """Return the keys to ask for."""
        new, self._new = self._new, []
        return new

    def wait_for(self, keys: list[OffloadKey], found: Future[list[bool]]) -> None:
        """Take note of a question that was sent."""
        self._asked.append((keys, found))

    def _collect(self) -> None:
        left = []
        for keys, found in self._asked:
            if found.done():
                self._answers.update(zip(keys, found.result(), strict=True))
            else:
                left.append((keys, found))
        self._asked = left
