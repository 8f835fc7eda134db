"""Copies of pages between device and host: which pages, and in which order on which stream. No vLLM here.

A *page* is what one tensor holds of one KV block: a row of bytes. A *chunk* is ``blocks_per_chunk`` pages in a row on
the host; a transfer may begin and end inside one.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from npu_kvconnector.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["Lane", "Run", "Transfer", "copy_runs", "plan_runs"]


class Run(NamedTuple):
    """Pages that lie in a row on both sides."""

    device: int
    host: int
    length: int


def plan_runs(
    block_ids: NDArray[np.int32],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_ids: NDArray[np.int32],
    blocks_per_chunk: int,
) -> list[list[Run]]:
    """Return the runs of each KV cache group of a transfer, stores and loads alike.

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
        pages = (chunks[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()[skip : skip + size]
        blocks = block_ids[block_at : block_at + size]
        if len(pages) != size or len(blocks) != size:
            break
        plan.append(_join(blocks, pages))
        block_at += size
        chunk_at += num_chunks
    if len(plan) != len(group_sizes) or block_at != len(block_ids) or chunk_at != len(chunk_ids):
        msg = f"{len(chunk_ids)} chunks of {blocks_per_chunk} blocks do not match {list(group_sizes)} blocks"
        raise TransferError(msg)
    return plan


def _join(device: NDArray[np.int32], host: NDArray[np.int64]) -> list[Run]:
    """Return pairs of pages as runs, so that one copy moves as much as possible."""
    if not len(device):
        return []
    breaks = np.flatnonzero((np.diff(device) != 1) | (np.diff(host) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.append(starts, len(device)))
    return [Run(*run) for run in zip(device[starts].tolist(), host[starts].tolist(), lengths.tolist(), strict=True)]


def copy_runs(device: torch.Tensor, host: torch.Tensor, runs: Sequence[Run], *, to_host: bool) -> int:
    """Copy pages between [blocks, page_size] on the device and [pages, page_size] on the host; return the bytes.

    Raises:
        TransferError: a run lies outside; a slice would be cut short in silence.
    """
    for run in runs:
        if min(run.device, run.host) < 0 or run.device + run.length > len(device) or run.host + run.length > len(host):
            msg = f"{run} lies outside of {len(device)} device blocks or {len(host)} host pages"
            raise TransferError(msg)
    # Rows with a gap between them are copied one by one: torch would stage a larger copy in device memory.
    most = len(host) if device.is_contiguous() else 1
    for first_device, first_host, length in runs:
        for offset in range(0, length, most):
            step = min(most, length - offset)
            on_device = device.narrow(0, first_device + offset, step)
            on_host = host.narrow(0, first_host + offset, step)
            target, source = (on_host, on_device) if to_host else (on_device, on_host)
            target.copy_(source, non_blocking=True)
    return sum(run.length for run in runs) * host.shape[1]


@dataclasses.dataclass(slots=True)
class Transfer:
    """A submitted job. ``seconds`` is known when it is done."""

    job_id: int
    num_bytes: int
    seconds: float = 0.0
    begin: torch.Event | None = None
    end: torch.Event | None = None

    def is_done(self) -> bool:
        """Whether every byte has arrived."""
        if self.begin is None or self.end is None:
            return True
        if not self.end.query():
            return False
        self.seconds = self.begin.elapsed_time(self.end) * 1e-3
        return True


class Lane:
    """Transfers in one direction, done in the order of their submission.

    On an accelerator they run on a stream of their own, each behind the work that the compute stream had when it was
    submitted. Elsewhere they are done when ``submit`` returns.
    """

    def __init__(self, device: torch.device) -> None:
        """Open the lane to ``device``."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device = device
        has_streams = accelerator is not None and accelerator.type == device.type
        self._stream = torch.Stream(device=device) if has_streams else None
        self._transfers: collections.deque[Transfer] = collections.deque()

    def submit(self, job_id: int, copy: Callable[[], int]) -> None:
        """Start a job; ``copy`` issues its copies and returns their bytes."""
        if self._stream is None:
            began = time.perf_counter()
            num_bytes = copy()
            self._transfers.append(Transfer(job_id, num_bytes, time.perf_counter() - began))
            return
        begin = torch.Event(device=self._device, enable_timing=True)
        end = torch.Event(device=self._device, enable_timing=True)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            begin.record(self._stream)
            num_bytes = copy()
            end.record(self._stream)
        self._transfers.append(Transfer(job_id, num_bytes, begin=begin, end=end))

    def take_finished(self) -> list[Transfer]:
        """Return the jobs done since the last call, oldest first."""
        finished = []
        while self._transfers and self._transfers[0].is_done():
            finished.append(self._transfers.popleft())
        return finished

    def wait(self, job_ids: set[int] | None = None) -> None:
        """Block until these jobs, or all, are done; jobs that are not here are done already."""
        for transfer in self._transfers:
            if transfer.end is not None and (job_ids is None or transfer.job_id in job_ids):
                transfer.end.synchronize()
