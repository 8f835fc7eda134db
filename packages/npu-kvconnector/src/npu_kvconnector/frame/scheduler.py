"""RecoveringScheduler: the connector's half in the scheduler, which tells the manager of the tiers what has failed.

Note [A reset while chunks are read]. A load takes several steps, and a reset forgets the chunks that it reads. They
must not be filled from a tier behind before the workers have read them to the end.

Note [Asked in every step]. While chunks are on their way, vLLM looks each of them up again in each step: of a prompt of
8,192 tokens 512, some milliseconds of every other request's. So a request whose chunks are all on their way, and which
waits for no tier's answer, is asked again only when chunks have arrived, or when that takes a hundredth of the time.

Note [A reset under running requests]. It takes their places, and they are scheduled again in the same step: vLLM names
them as preempted, though they may load by then. Of those it waits for stores, and ends the engine where it finds a
load. A request that loads has no stores: vLLM lets it begin after them.

Note [Adapters]. A block computed with an adapter is named by the adapter's weights, too. Where these are not known, a
request has names of its own, by which nobody else finds blocks, and stores none.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from npu_kvconnector.compat import hear_of_adapters, salt_blocks
from npu_kvconnector.frame.adapters import AdapterWeights
from npu_kvconnector.frame.metadata import JobsMetadata, StepMetadata
from npu_kvconnector.tiers.courtesy import note_step

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from npu_kvconnector.frame.room import Room

__all__ = ["RecoveringScheduler"]

_PAUSE = 100.0  # times what a question took, until it is asked again


class _Wait(NamedTuple):
    """A request whose chunks are on their way: how many had arrived when it was asked, and until when it is not."""

    arrivals: int
    until: float


class _OfUnknownWeights:
    """Marks a request of which no blocks are stored."""


class RecoveringScheduler(OffloadingConnectorScheduler):
    """vLLM's; it completes failed jobs too, so the manager hears first which these are."""

    def __init__(self, *arguments: Any) -> None:
        """Start without jobs; the arguments are vLLM's."""
        super().__init__(*arguments)
        self._reading: dict[int, int] = {}  # loads of before a reset -> workers that are not through
        self._waits: dict[str, _Wait] = {}
        self._adapters = AdapterWeights()
        hear_of_adapters(self._adapters.note_load, self._adapters.note_removal)
        self._room: Room | None = None

    def on_new_request(self, request: Request) -> None:
        """Take note of a request; see Note [Adapters]."""
        if request.lora_request is None:
            super().on_new_request(request)
            return
        digest = self._adapters.digest_of(request.lora_request)
        salt_blocks(request, f"adapter {digest or uuid.uuid4()}")
        super().on_new_request(request)
        if digest is None:
            self._req_status[request.request_id].req_context.set_state(_OfUnknownWeights())

    def bind_room(self, room: Room) -> None:
        """Say where loads find their blocks, once the scheduler's caches are there."""
        self._room = room

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, *arguments: Any, **more: Any
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, None while that is not known; see Note [Asked in every step]."""
        wait = self._waits.pop(request.request_id, None)
        began = time.monotonic()
        if wait is not None and wait.arrivals == self.manager.arrivals and began < wait.until:
            self._waits[request.request_id] = wait
            return None, False
        self.manager.has_to_ask = False
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, *arguments, **more)
        if tokens and self._room is not None and not self._room.is_enough(request, num_computed_tokens + tokens):
            tokens, is_async = None, False
        if tokens is None and not self.manager.has_to_ask:
            now = time.monotonic()
            self._waits[request.request_id] = _Wait(self.manager.arrivals, now + _PAUSE * (now - began))
        return tokens, is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Take note of the blocks that a request loads into."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and self._room is not None:
            self._room.note_load(request)

    def request_finished(self, request: Request, *arguments: Any, **more: Any) -> Any:
        """Forget a request, of which transfers may go on; say where its blocks may be fetched, if a tier holds them."""
        self._waits.pop(request.request_id, None)
        if self._room is not None:
            self._room.forget([request.request_id])
        status = self._req_status.get(request.request_id)
        is_kept, params = super().request_finished(request, *arguments, **more)
        if params is None and status is not None and request.kv_transfer_params:
            params = self.manager.transfer_params(status.req_context)
        return is_kept, params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the workers are to do in this step."""
        meta = super().build_connector_meta(self._without_loading(scheduler_output))
        if self._room is not None:
            self._room.forget(scheduler_output.num_scheduled_tokens)
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        note_step(is_idle=is_idle)
        return StepMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, is_idle=is_idle)

    def _without_loading(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step, in which no request is preempted that loads; see Note [A reset under running requests]."""
        if not step.preempted_req_ids:
            return step
        loading = {job.req_id for job in self._jobs.values() if not job.is_store}
        return dataclasses.replace(step, preempted_req_ids=step.preempted_req_ids - loading)

    def reset_cache(self) -> None:
        """Forget what the host tier holds; see Note [A reset while chunks are read]."""
        self._reading |= {number: job.pending_count for number, job in self._jobs.items() if not job.is_store}
        super().reset_cache()
        self.manager.is_held = bool(self._reading)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what has ended on the workers."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, JobsMetadata):
            for job_id in meta.failed_jobs:
                job = self._jobs.get(job_id)  # none: the cache was reset since
                if job is not None:
                    self.manager.note_failure(job.keys, job.req_id, is_store=job.is_store)
            for job_id in self._reading.keys() & meta.completed_jobs.keys():
                self._reading[job_id] -= meta.completed_jobs[job_id]
            self._reading = {job_id: left for job_id, left in self._reading.items() if left > 0}
            self.manager.is_held = bool(self._reading)
        super().update_connector_output(connector_output)

    def _calc_num_offloadable_tokens(self, req_status: RequestOffloadState, num_computed_tokens: int) -> int:
        if req_status.req_context.get_state(_OfUnknownWeights) is not None:
            return 0
        return super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
