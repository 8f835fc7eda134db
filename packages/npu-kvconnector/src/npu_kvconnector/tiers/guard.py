"""GuardedTier: any secondary tier of vLLM's, so that its slowness and its errors cost recomputation and nothing else.

It stands between vLLM's tiering manager and the tier. An exception becomes a miss or a failed job, a deadline a miss,
repeated failures open a circuit breaker, and what a tier reports about jobs that it does not have is left out.

Note [Three breakers]. Loads, stores, and what is looked up and sealed for peers that ask fail apart, so each has a
breaker: a server whose own peers have died still answers those that ask it. While the last one is open, a tier that has
a method ``decline_external_requests`` is told so in each step, and whoever asks need not wait for an answer.

Note [One asks for all]. A tier that has been skipped and is silent still would let every request wait again, each time
that it is tried. So one request waits for its answer, and the others do without meanwhile.

Note [A late load]. A load that outlasts its deadline may still write to its chunk of the host tier. So requests stop
waiting for it, but the chunk stays reserved until the tier reports the end. A tier that never does would take the host
tier away, a try after the other: it is asked for nothing while it holds ``pending_share`` of it.

Note [A store that is refused]. Where another process writes a durable store, this one's chunks are refused at once, and
its first one after that process has ended makes this one the writer. An open breaker would keep that one back.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager

from npu_kvconnector import metrics
from npu_kvconnector.tiers.breaker import BreakerState, CircuitBreaker
from npu_kvconnector.tiers.patience import Patience
from npu_kvconnector.tiers.sealed import RefusedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from npu_kvconnector.config import GuardConfig

__all__ = ["GuardedTier"]

logger = init_logger("vllm.npu_kvconnector")

_REMEMBERED = 65_536  # chunks that could not be loaded lately
_ABOUT = 0.05  # seconds, within which it is known when an answer came
_POLL_SECONDS = 0.1  # how often a skipped tier is asked for what has ended


class GuardedTier(SecondaryTierManager):
    """A tier behind deadlines, circuit breakers and counters; called by the scheduler alone."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        config: GuardConfig,
        *,
        label: str,
        num_chunks: int,
        blocks_per_chunk: int,
        learns: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard ``tier``.

        Args:
            tier: any manager of vLLM's interface.
            config: deadlines and the breakers' numbers.
            label: the tier in metrics and logs, such as "1:durable".
            num_chunks: chunks of the host tier.
            blocks_per_chunk: KV blocks in a chunk.
            learns: whether requests wait less for an answer where the tier is known to be quick.
            clock: seconds, for tests.
        """
        # Not super().__init__: the memory and what goes with it are the guarded tier's.
        self.tier = tier
        self.tier_type = tier.tier_type
        self.locality = tier.locality
        self.medium = tier.medium  # type: ignore[misc]  # of the guarded tier's class
        self.cache_hit_source = tier.cache_hit_source  # type: ignore[misc]
        self.loads = CircuitBreaker(config, clock)
        self.stores = CircuitBreaker(config, clock)
        self.serves = CircuitBreaker(config, clock)
        self._operations = {self.loads: "load", self.stores: "store"}
        if type(tier).serve_external_requests is not SecondaryTierManager.serve_external_requests:
            self._operations[self.serves] = "serve"
        self._config = config
        self._label = label
        self._most_pending = max(1, int(config.pending_share * num_chunks))
        self._blocks_per_chunk = blocks_per_chunk
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobResult] = []  # jobs that the tier did not take
        self._loading: dict[OffloadKey, float] = {}  # until when requests wait for it
        self._late_chunks = 0  # of loads that nobody waits for any more
        self._failed: collections.OrderedDict[OffloadKey, float] = collections.OrderedDict()  # until when not asked for
        self._asked: dict[str, _Wait] = {}  # by request
        self._patience = Patience(config.lookup_seconds, learns=learns)
        self._trying = ""  # the request that waits, see Note [One asks for all]
        self._last_poll = 0.0
        self._logged: set[tuple[str, str]] = set()
        self._stats = OffloadingConnectorStats()
        self._opened: dict[CircuitBreaker, int] = {}

    @property
    def block_size_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.tier.block_size_bytes

    @property
    def bp_detector(self) -> BackpressureDetector | None:
        """vLLM's back pressure, where the tier's options ask for it."""
        return self.tier.bp_detector

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return what the tier says, or MISS where it is skipped, raises, or does not say in time."""
        if not self.loads.allows() or self._late_chunks >= self._most_pending or self._is_failed(key):
            self._count(metrics.SKIPPED_CHUNKS, "load")
            return LookupResult.MISS
        result = self._call("lookup", lambda: self.tier.lookup(key, req_context), LookupResult.MISS, self.loads)
        if result is LookupResult.RETRY:
            return self._in_time(req_context.req_id)
        if req_context.req_id in self._asked:
            self._note_answer(req_context.req_id)
        return result

    def _is_failed(self, key: OffloadKey) -> bool:
        return self._failed.get(key, 0.0) > self._clock()

    def is_overdue(self, key: OffloadKey) -> bool:
        """Return whether a load of this chunk has outlasted its deadline; see Note [A late load]."""
        return self._loading.get(key, float("inf")) < self._clock()

    def accepts(self, num_chunks: int) -> bool:
        """Return whether chunks may be stored to the tier now: its breaker allows it and not too many are pending."""
        pending = sum(len(job.keys) for job in self._jobs.values() if not job.is_load)
        accepted = self.stores.allows() and (not pending or pending + num_chunks <= self._most_pending)
        if not accepted:
            self._count(metrics.SKIPPED_CHUNKS, "store", num_chunks)
        return accepted

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Let the tier load chunks; what it does not take has failed."""
        job = self._begin(job_metadata, self.loads, self._config.load_seconds)
        for key in job.keys:
            self._loading[key] = job.deadline
        if not self._call("submit_load", lambda: _true(self.tier.submit_load(job_metadata)), False, self.loads):
            self._ended.append(JobResult(job_metadata.job_id, success=False))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Let the tier store chunks; what it does not take has failed."""
        self._begin(job_metadata, self.stores, self._config.store_seconds)
        if not self._call("submit_store", lambda: _true(self.tier.submit_store(job_metadata)), False, self.stores):
            self._ended.append(JobResult(job_metadata.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call, each once, and take note of those that are overdue."""
        if self._is_left_alone():
            return []
        results = self._call("get_finished_jobs", lambda: list(self.tier.get_finished_jobs()), [], self.loads)
        results += self._ended
        self._ended = []
        checked = [self._end(self._jobs.pop(result.job_id), result) for result in results if self._is_known(result)]
        self._note_overdue()
        return checked

    def expect(self, job: TransferJob) -> None:
        """Take note of a store that the tier starts by itself, for a peer."""
        self._note(job, self.serves, self._config.store_seconds)

    def has_pending_work(self) -> bool:
        """Return whether the tier, or a job that it did not take, needs another step."""
        return bool(self._ended) or self._call("has_pending_work", self.tier.has_pending_work, False, self.loads)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the tier's KV events."""
        return self._call("take_events", lambda: list(self.tier.take_events()), [], self.loads)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Tell the tier which chunks were used, unless it is skipped."""
        if self.loads.state is BreakerState.CLOSED:
            self._call("touch", lambda: self.tier.touch(keys, req_context), None, self.loads)

    def transfer_params(self, req_context: ReqContext) -> dict[str, Any] | None:
        """Return what the tier says of where a request's blocks may be fetched; most tiers have nothing to say."""
        make = getattr(self.tier, "transfer_params", None)
        return None if make is None else self._call("transfer_params", lambda: make(req_context), None, self.stores)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Tell the tier of a request; return how it wants it offloaded."""
        return self._call(
            "on_new_request", lambda: self.tier.on_new_request(req_context), RequestOffloadingContext(), self.loads
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Tell the tier that a request has ended."""
        self._asked.pop(req_context.req_id, None)
        self._call("on_request_finished", lambda: self.tier.on_request_finished(req_context), None, self.loads)

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Let the tier serve its peers, or decline to; see Note [Three breakers]."""
        if self.serves not in self._operations:  # the tier has no peers
            return
        known = _Parent(parent, self)
        if self.serves.allows():
            self._call("serve_external_requests", lambda: self.tier.serve_external_requests(known), None, self.serves)
            return
        decline = getattr(self.tier, "decline_external_requests", None)
        if decline is not None:
            self._call("decline_external_requests", lambda: decline(known), None, self.serves)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Tell the tier that a step was scheduled; requests that were, or lost their place, may wait anew."""
        for request in (*context.new_req_ids, *context.preempted_req_ids):
            self._asked.pop(request, None)
        if not self._is_left_alone():
            self._call("on_schedule_end", lambda: self.tier.on_schedule_end(context), None, self.loads)

    def drain_jobs(self) -> None:
        """Block until the tier has ended all jobs, or raises."""
        self._last_poll = 0.0
        try:
            self.tier.drain_jobs()
        except Exception as error:  # noqa: BLE001  # as in _call; but this one may take its time
            self._note_failed_call("drain_jobs", self.loads, error)

    def abandon(self, job_id: int) -> None:
        """Forget a job whose end the tier does not report; that is a failure, the end of a breaker's try too."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        if not job.is_overdue:
            self._fail(job.breaker)
        if job.is_load:
            self._note_load_over(job)

    def shutdown(self) -> None:
        """Release what the tier holds."""
        self.tier.shutdown()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the tier's own figures and the guard's, since the last call."""
        stats, self._stats = self._stats, OffloadingConnectorStats()
        own = self._call("get_stats", self.tier.get_stats, None, self.loads)
        if own is not None:
            stats.aggregate(own)
        for breaker, operation in self._operations.items():
            times = breaker.times_opened - self._opened.get(breaker, 0)
            stats.set_gauge(metrics.BREAKER_STATE, int(breaker.state), (self._label, operation))
            stats.increase_counter(metrics.BREAKER_OPENED, times, (self._label, operation))
            self._opened[breaker] = breaker.times_opened
        return stats

    def _call(self, name: str, call: Callable[[], Any], default: Any, breaker: CircuitBreaker) -> Any:
        """Return the call's result; where it raises, `default`. Raising and taking too long are failures."""
        began = self._clock()
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  # whatever a tier raises must not end the engine
            self._note_failed_call(name, breaker, error)
            return default
        if self._clock() - began > self._config.call_seconds:
            self._note_failed_call(name, breaker, TimeoutError(f"took {self._clock() - began:.3f} s"))
        return result

    def _note_failed_call(self, name: str, breaker: CircuitBreaker, error: Exception) -> None:
        self._stats.increase_counter(metrics.FAILED_CALLS, 1, (self._label, name))
        self._fail(breaker)
        if (name, type(error).__name__) not in self._logged:
            self._logged.add((name, type(error).__name__))
            logger.warning("Tier %s: %s failed (further ones are only counted): %r", self._label, name, error)

    def _fail(self, breaker: CircuitBreaker) -> None:
        if breaker.fail():
            operation = self._operations[breaker]
            logger.warning("Tier %s is skipped for %ss: %d failures in a row", self._label, operation, breaker.failures)

    def _in_time(self, request: str) -> LookupResult:
        """Return whether a request still waits for the tier's answers: RETRY; or no longer: MISS."""
        now = self._clock()
        if self.loads.state is BreakerState.HALF_OPEN:
            self._trying = self._trying if self._trying in self._asked else request
            if self._trying != request:
                return LookupResult.MISS
        wait = self._asked.setdefault(request, _Wait(now))
        if now - wait.since <= self._patience.seconds:
            wait.asked = now
            return LookupResult.RETRY
        if wait.since > -math.inf:  # once a request
            self._note_failed_call("lookup", self.loads, TimeoutError(f"no answer in {now - wait.since:.3f} s"))
            wait.since = -math.inf
        return LookupResult.MISS

    def _note_answer(self, request: str) -> None:
        """Take note of the first answer that a request had in time, where no long step hides when it came."""
        wait, now = self._asked[request], self._clock()
        if not wait.was_answered and wait.since > -math.inf and now - wait.asked <= _ABOUT:
            self._patience.note(now - wait.since)
        wait.was_answered = True

    def _begin(self, job: TransferJob, breaker: CircuitBreaker, seconds: float) -> _Job:
        breaker.begin()
        return self._note(job, breaker, seconds)

    def _note(self, job: TransferJob, breaker: CircuitBreaker, seconds: float) -> _Job:
        noted = self._jobs[job.job_id] = _Job(tuple(job.keys), job.is_promotion, breaker, self._clock() + seconds)
        return noted

    def _is_known(self, result: JobResult) -> bool:
        if result.job_id not in self._jobs:
            self._note_failed_call("get_finished_jobs", self.loads, KeyError(f"no such job: {result.job_id}"))
            return False
        return True

    def _end(self, job: _Job, result: JobResult) -> JobResult:
        """Take note of a job's end and return it, with no keys that the job does not have."""
        if result.success:
            job.breaker.succeed()
        elif isinstance(result, RefusedJob):  # see Note [A store that is refused]
            job.breaker.dismiss()
        elif not job.is_overdue:
            self._fail(job.breaker)
        if not job.is_load:
            for key in job.keys if result.success else ():
                self._failed.pop(key, None)
            return result
        self._note_load_over(job)
        delivered = job.keys if result.success else set(result.successful_keys or ()) & set(job.keys)
        missing = [key for key in job.keys if key not in delivered] if len(delivered) < len(job.keys) else []
        self._note_missing(missing, count=not job.is_overdue)
        if not result.success:
            result.successful_keys = tuple(delivered) or None
        return result

    def _note_load_over(self, job: _Job) -> None:
        self._late_chunks -= len(job.keys) if job.is_overdue else 0
        for key in job.keys:
            self._loading.pop(key, None)

    def _note_missing(self, keys: list[OffloadKey], *, count: bool) -> None:
        """Let chunks that could not be loaded not be asked for, else requests would try them for ever."""
        until = self._clock() + self._config.max_open_seconds
        for key in keys:
            self._failed[key] = until
            self._failed.move_to_end(key)
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        if count and keys:
            self._stats.increase_counter(metrics.RECOMPUTED_BLOCKS, len(keys) * self._blocks_per_chunk, (self._label,))

    def _note_overdue(self) -> None:
        now = self._clock()
        for job in self._jobs.values():
            if job.deadline < now and not job.is_overdue:
                job.is_overdue = True
                self._count(metrics.OVERDUE_JOBS, self._operations[job.breaker])
                self._fail(job.breaker)
                if job.is_load:
                    self._late_chunks += len(job.keys)
                    blocks = len(job.keys) * self._blocks_per_chunk
                    self._stats.increase_counter(metrics.RECOMPUTED_BLOCKS, blocks, (self._label,))

    def _is_left_alone(self) -> bool:
        """Return whether a skipped tier is not to be called in this step."""
        now = self._clock()
        is_awaited = self._ended or any(job.breaker is self.serves for job in self._jobs.values())
        if self.loads.state is BreakerState.OPEN and now - self._last_poll < _POLL_SECONDS and not is_awaited:
            return True
        self._last_poll = now
        return False

    def _count(self, name: str, operation: str, number: int = 1) -> None:
        self._stats.increase_counter(name, number, (self._label, operation))


@dataclasses.dataclass(slots=True)
class _Wait:
    """Of a request, for answers: since when, -inf when it was long enough; when it asked last; whether it had one."""

    since: float
    asked: float = -math.inf
    was_answered: bool = False


class _Job:
    """A transfer that the tier has."""

    __slots__ = ("breaker", "deadline", "is_load", "is_overdue", "keys")

    def __init__(self, keys: tuple[OffloadKey, ...], is_load: bool, breaker: CircuitBreaker, deadline: float) -> None:
        self.keys = keys
        self.is_load = is_load
        self.breaker = breaker
        self.deadline = deadline
        self.is_overdue = False


class _Parent(ParentManager):
    """The manager as a tier sees it while it serves peers; the guard takes note of the jobs that it makes there."""

    def __init__(self, parent: ParentManager, guard: GuardedTier) -> None:
        self._parent = parent
        self._guard = guard

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self._parent.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._parent.lookup(key, req_context)

    def create_store_job(self, keys: Collection[OffloadKey], req_context: ReqContext) -> TransferJob:
        job = self._parent.create_store_job(keys, req_context)
        self._guard.expect(job)
        return job

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._parent.on_request_finished(req_context)


def _true(_: None) -> bool:
    """Return True: a call that returns nothing came back."""
    return True
