"""Which pages a transfer moves, and in which order on which stream. No vLLM here.

A *page* is what one layer's cache holds of one KV block. A *chunk* is ``blocks_per_chunk`` blocks in a row in the host
tier; a transfer may begin and end inside one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from npu_kvconnector.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["Lane", "Pace", "Pairs", "Run", "Transfer", "join_runs", "plan_pairs"]

_SHARE = 0.05
_MOST_SECONDS = 0.002
"""The next step may be shorter than the last."""
_IDLE_SECONDS = 0.02
"""A request that comes meanwhile waits as long."""


class Pairs(NamedTuple):
    """Blocks of the device, each with its place in the host tier: chunk * blocks_per_chunk + place in the chunk."""

    blocks: NDArray[np.int64]
    places: NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that lie in a row on both sides."""

    block: int
    place: int
    length: int


def plan_pairs(
    block_ids: NDArray[np.int32],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_ids: NDArray[np.int32],
    blocks_per_chunk: int,
) -> list[Pairs]:
    """Return what each KV cache group of a transfer moves, stores and loads alike.

    Args:
        block_ids: device blocks, group after group.
        group_sizes: how many of them belong to each group.
        block_indices: for each group, the place of its first block in its request; it tells where in the first chunk
            the transfer begins.
        chunk_ids: host chunks, group after group.
        blocks_per_chunk: blocks in a chunk.

    Raises:
        TransferError: blocks and chunks do not match in number.
    """
    plan = []
    block_at = chunk_at = 0
    for size, index in zip(group_sizes, block_indices, strict=True):
        skip = index % blocks_per_chunk if size else 0
        num_chunks = -(-(skip + size) // blocks_per_chunk)
        chunks = chunk_ids[chunk_at : chunk_at + num_chunks].astype(np.int64)
        places = (chunks[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()[skip : skip + size]
        blocks = block_ids[block_at : block_at + size].astype(np.int64)
        if len(places) != size or len(blocks) != size:
            break
        plan.append(Pairs(blocks, places))
        block_at += size
        chunk_at += num_chunks
    if len(plan) != len(group_sizes) or block_at != len(block_ids) or chunk_at != len(chunk_ids):
        msg = f"{len(chunk_ids)} chunks of {blocks_per_chunk} blocks do not match {list(group_sizes)} blocks"
        raise TransferError(msg)
    return plan


def join_runs(pairs: Pairs, blocks_per_chunk: int) -> list[Run]:
    """Return pairs as runs, so that one copy moves as much as possible.

    A run of chunks of several blocks ends with its chunk: what follows in the host tier is another layer's.
    """
    blocks, places = pairs
    if not len(blocks):
        return []
    is_break = (np.diff(blocks) != 1) | (np.diff(places) != 1)
    if blocks_per_chunk > 1:
        is_break |= places[1:] % blocks_per_chunk == 0
    starts = np.concatenate(([0], np.flatnonzero(is_break) + 1))
    lengths = np.diff(np.append(starts, len(blocks)))
    return [Run(*run) for run in zip(blocks[starts].tolist(), places[starts].tolist(), lengths.tolist(), strict=True)]


@dataclasses.dataclass(slots=True)
class Transfer:
    """A submitted job. ``seconds`` is known when it is done, ``error`` when it has failed."""

    job_id: int
    pieces: Iterator[int] | None
    """The copies that are not issued yet; each gives its bytes."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    begin: torch.Event | None = None
    end: torch.Event | None = None

    def is_done(self) -> bool:
        """Whether every byte has arrived, or none will any more."""
        if self.pieces is not None:
            return False
        if self.begin is None or self.end is None:
            return True
        try:
            if not self.end.query():
                return False
            self.seconds = self.begin.elapsed_time(self.end) * 1e-3
        except RuntimeError as error:  # the device failed while it copied
            self.error = self.error or error
        return True


class Pace:
    """How long loads may be copied in a step, so that other requests hardly notice: a share of what the step takes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start before the first step; ``clock`` is for tests."""
        self._clock = clock
        self._began = -math.inf

    def begin_step(self, spent: float, *, is_idle: bool) -> float:
        """Return the seconds for each call that copies in the step that begins now.

        Args:
            spent: seconds that copies took since the last step began.
            is_idle: whether no request is computed in the step.
        """
        now = self._clock()
        seconds, self._began = now - self._began - spent, now
        if is_idle:
            return _IDLE_SECONDS
        return min(max(_SHARE * seconds, 0.0), _MOST_SECONDS)


class Lane:
    """Transfers in one direction, done in the order of their submission.

    On an accelerator they run on a stream of their own, each behind the work that the compute stream had when it was
    issued.

    Note [Pieces of a step]. Where a device copies at once (a host, a software NPU), whoever submits waits for the copy,
    and so do all requests of the step: 1 GB is 70 ms. So only as much is issued in one call as takes ``seconds``, and
    the rest in the steps to come; see :class:`Pace`. A copy that can end by the clock itself asks :meth:`left`. A
    device that copies by itself takes all of it at the first call.
    """

    def __init__(self, device: torch.device, *, seconds: float = math.inf) -> None:
        """Open the lane to ``device``; ``submit`` and ``take_finished`` issue copies for so many seconds each."""
        self.seconds = seconds
        self._spent, self._until = 0.0, math.inf
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = device
        has_streams = accelerator is not None and accelerator.type == device.type
        self._stream = torch.Stream(device=device) if has_streams else None
        self._transfers: collections.deque[Transfer] = collections.deque()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the jobs that are not known to be done."""
        return sum(transfer.num_bytes for transfer in self._transfers)

    def submit(self, job_id: int, copy: Callable[[], Iterator[int]]) -> None:
        """Start a job; ``copy`` issues its copies and gives the bytes of each. What it raises is the job's error."""
        self._transfers.append(Transfer(job_id, copy()))
        self._go_on(self.seconds)

    def take_finished(self) -> list[Transfer]:
        """Return the jobs done since the last call, oldest first; see Note [Pieces of a step]."""
        self._go_on(self.seconds)
        finished = []
        while self._transfers and self._transfers[0].is_done():
            finished.append(self._transfers.popleft())
        return finished

    def wait(self, job_ids: set[int] | None = None) -> None:
        """Block until these jobs, or all, are done; jobs that are not here are done already."""
        if any(job_ids is None or transfer.job_id in job_ids for transfer in self._transfers):
            self._go_on(math.inf)
        for transfer in self._transfers:
            if transfer.end is not None and (job_ids is None or transfer.job_id in job_ids):
                try:
                    transfer.end.synchronize()
                except RuntimeError as error:  # the device failed while it copied
                    transfer.error = transfer.error or error

    def left(self) -> float:
        """Return the seconds that there are for the copies that are issued now."""
        return self._until - time.perf_counter()

    def take_spent(self) -> float:
        """Return the seconds that issuing copies took since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _go_on(self, seconds: float) -> None:
        """Issue copies for so long, the oldest job's first."""
        began = time.perf_counter()
        self._until = began + seconds
        self._issue()
        self._spent += time.perf_counter() - began

    def _issue(self) -> None:
        for transfer in self._transfers:
            if transfer.pieces is None:
                continue
            try:
                if self._stream is None:
                    _issue(transfer, self._until)
                else:
                    self._issue_to(self._stream, transfer)
            except (RuntimeError, TransferError) as error:
                transfer.error, transfer.pieces = error, None
            if transfer.pieces is not None:
                return

    def _issue_to(self, stream: torch.Stream, transfer: Transfer) -> None:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            if transfer.begin is None:
                begin = torch.Event(device=self._device, enable_timing=True)
                begin.record(stream)
                transfer.begin = begin
            try:
                _issue(transfer, self._until)
            except (RuntimeError, TransferError) as error:
                transfer.error, transfer.pieces = error, None
            if transfer.pieces is None:  # copies before one that failed are on their way
                end = torch.Event(device=self._device, enable_timing=True)
                end.record(stream)
                transfer.end = end


def _issue(transfer: Transfer, until: float) -> None:
    """Issue copies of a job, one at least, until all are or it is time."""
    assert transfer.pieces is not None
    began = time.perf_counter()
    for size in transfer.pieces:
        transfer.num_bytes += size
        if time.perf_counter() >= until:
            break
    else:
        transfer.pieces = None
    transfer.seconds += time.perf_counter() - began
