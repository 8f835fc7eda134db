"""What a client saw of its requests, as snapshots: a span each second or more, with the requests that ended in it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from npu_statlogger.fold import Batch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npu_statlogger.tools.request import Request

__all__ = ["ERROR", "ClientSpans"]

ERROR = "error"
"""Reason of a request that failed: it counts, and its times do not."""


class ClientSpans:
    """Requests in spans of `length` seconds from `start` on."""

    def __init__(self, start: float, length: float, process: str, model: str) -> None:
        self._start, self._length = start, length
        self._process, self._model = process, model
        self._batches: defaultdict[int, Batch] = defaultdict(Batch)

    def add(self, request: Request, gaps: Iterable[float]) -> None:
        """Take in a request and the times between its tokens."""
        batch = self._batches[max(0, int((request.end - self._start) / self._length))]
        batch.counters[f"{names.FINISHED}{request.reason}"] += 1
        if request.reason == ERROR:
            return
        batch.counters["prompt_tokens"] += request.prompt_tokens
        batch.counters[names.GENERATED] += request.generation_tokens
        values = {
            names.TTFT: request.ttft,
            names.TPOT: request.tpot,
            names.E2E: request.e2e,
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.generation_tokens,
        }
        for name, value in values.items():
            if value is not None:
                batch.values[name].append(value)
        batch.values[names.ITL] += gaps

    def take(self, until: float) -> Iterator[Snapshot]:
        """Yield the spans that ended by `until`, in the order of time, and forget them."""
        for slot in sorted(self._batches):
            start = self._start + slot * self._length
            if start + self._length <= until:
                end = start + self._length
                snapshot = Snapshot(start, end, processes={self._process}, models={self._model})
                snapshot.add(self._batches.pop(slot))
                yield snapshot
