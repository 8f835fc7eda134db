"""Probes: questions of peers for whatever this server's other tiers have, answered from the scheduler's steps.

A question comes in the event loop. In its next step the scheduler looks the keys up as those of a request of its own,
so that chunks come from the tiers behind the host's as well, and pins what the host tier has until it is sealed into
the outbox. The answer is what is sealed when all is settled, or when the time is up.

Note [Pinned in one piece]. Looking up one chunk may bring it from a tier behind, into the place of another that was
just found. So chunks are pinned after a pass in which all of them were found, since such a pass moves nothing.

Note [In turn]. What a step looks up, and what may be pinned, is bounded, and one question may take all of it: a long
one, or one whose chunks come from a slow tier, step after step. So another one goes first in each step.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import uuid
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult, ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import JobId, ParentManager, TransferJob

__all__ = ["Probe", "Probes"]

_MOST_PROBES = 256  # that wait at a time; further ones find nothing
_MOST_LOOKUPS = 1024  # in a step, of all probes together: the engine's own requests wait meanwhile


class Probe:
    """A question of a peer."""

    def __init__(self, transfer: str, keys: Iterable[OffloadKey]) -> None:
        self.transfer = transfer
        self.left = dict.fromkeys(keys)
        """Keys that are not settled; of the scheduler."""
        self.jobs: set[JobId] = set()
        """Of blocks that are being sealed."""
        self.held: set[OffloadKey] = set()
        """Keys of the blocks that are in the outbox."""
        self.is_over = False
        """Whether nobody waits for the answer any more."""
        self.is_cancelled = False
        """Whether the transfer is not wanted any more."""
        self.is_looked_up = False
        self.settled = asyncio.Event()
        self.request = ReqContext(req_id=f"p2p_tcp {uuid.uuid4().hex}")

    def note(self) -> None:
        """Let the answer go if there is nothing more to come; for the event loop."""
        if self.is_looked_up and not self.jobs:
            self.settled.set()


class Probes:
    """The questions that wait. `ask` and `cancel` are for the event loop, all else is for the scheduler."""

    def __init__(self, most_chunks: int, ring: Callable[[], None]) -> None:
        """Begin without a question.

        Args:
            most_chunks: of the host tier that are pinned at a time.
            ring: lets an engine that has nothing to do take a step.
        """
        self._most_chunks = most_chunks
        self._ring = ring
        self._new: collections.deque[Probe] = collections.deque()
        self._open: collections.deque[Probe] = collections.deque()
        self._asked: set[Probe] = set()  # of the event loop
        self._pinned: dict[JobId, int] = {}

    # --- of the event loop ------------------------------------------------------------------------------------------

    async def ask(self, transfer: str, keys: Sequence[OffloadKey], seconds: float) -> list[bool]:
        """Have what is here sealed for a transfer; say for each key whether its block was, after so long at most."""
        if max(len(self._asked), len(self._new)) >= _MOST_PROBES:  # the engine may take no steps, as while it sleeps
            return [False] * len(keys)
        probe = Probe(transfer, keys)
        self._asked.add(probe)
        self._new.append(probe)
        self._ring()
        try:
            async with asyncio.timeout(seconds):
                await probe.settled.wait()
        except TimeoutError:
            pass  # the answer is what there is
        finally:
            probe.is_over = True
            self._asked.discard(probe)
        return [key in probe.held for key in keys]

    def cancel(self, transfers: Iterable[str]) -> None:
        """Forget the questions of transfers that are not wanted any more."""
        gone = set(transfers)
        for probe in self._asked:
            if probe.transfer in gone:
                probe.is_over = probe.is_cancelled = True
                probe.settled.set()

    # --- of the scheduler -------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether a step is needed."""
        return bool(self._new or self._open)

    def serve(
        self,
        parent: ParentManager,
        seal: Callable[[TransferJob, Probe], None],
        settle: Callable[[Probe], None],
    ) -> None:
        """Look up what peers ask for.

        Args:
            parent: vLLM's manager of all tiers.
            seal: begins to seal a job's blocks for a probe; `end` is to be called when it has ended.
            settle: is told of a probe of which nothing more is looked up.
        """
        while self._new:
            probe = self._new.popleft()
            if not probe.is_over:
                parent.on_new_request(probe.request)
                self._open.append(probe)
        lookups = _MOST_LOOKUPS
        self._open.rotate(-1)  # see Note [In turn]
        for probe in list(self._open):
            try:
                if not probe.is_over:
                    lookups -= self._advance(probe, parent, seal, lookups)
            except Exception:
                probe.left.clear()  # it is answered in the next step, with what is sealed by then
                raise
            if probe.is_over or not probe.left:
                self._open.remove(probe)
                parent.on_request_finished(probe.request)
                self._settle(probe, settle)

    def decline(self, parent: ParentManager, settle: Callable[[Probe], None]) -> None:
        """Answer what peers ask for with what is sealed by now; the arguments are those of `serve`."""
        while self._open:
            probe = self._open.popleft()
            parent.on_request_finished(probe.request)
            self._settle(probe, settle)
        while self._new:
            self._settle(self._new.popleft(), settle)

    def end(self, jobs: Iterable[JobId]) -> None:
        """Take note that jobs have ended, whose chunks are not pinned any more."""
        for job in jobs:
            self._pinned.pop(job, None)

    def _settle(self, probe: Probe, settle: Callable[[Probe], None]) -> None:
        probe.is_looked_up = True
        settle(probe)

    def _advance(
        self, probe: Probe, parent: ParentManager, seal: Callable[[TransferJob, Probe], None], most: int
    ) -> int:
        """Look up a probe's keys and pin those that are in the host tier; return how many were looked up."""
        room = max(0, min(self._most_chunks - sum(self._pinned.values()), most))
        keys = looked_up = list(itertools.islice(probe.left, room))
        found: list[OffloadKey] | None = None
        while found is None or len(found) < len(keys):  # see Note [Pinned in one piece]
            keys = keys if found is None else found
            found = []
            for key in keys:
                result = parent.lookup(key, probe.request)
                if result is LookupResult.HIT:
                    found.append(key)
                elif result is LookupResult.MISS:
                    probe.left.pop(key, None)
        if found:
            job = parent.create_store_job(found, probe.request)
            self._pinned[job.job_id] = len(found)
            probe.jobs.add(job.job_id)
            for key in found:
                del probe.left[key]
            seal(job, probe)
        return len(looked_up)
