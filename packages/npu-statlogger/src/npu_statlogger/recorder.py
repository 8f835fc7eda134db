"""The background half: a bounded queue that costs the caller one append, and the thread that folds and writes.

The thread wakes every FOLD_SECONDS, so that the queue stays short, and writes a line for each engine every `interval`
seconds if anything happened. What a failing disk refuses stays in memory (its size is constant) and goes into the next
lines.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from npu_statlogger import fold
from npu_statlogger.jsonl import LineWriter
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_statlogger.config import StatLoggerConfig

__all__ = ["FOLD_SECONDS", "QUEUE_LIMIT", "Recorder"]

# vLLM puts its handlers on the logger "vllm"; a name below it is enough and needs no import of vLLM.
logger = logging.getLogger("vllm.npu_statlogger")

FOLD_SECONDS = 0.25
QUEUE_LIMIT = 4096
"""Records kept between two wake-ups; at 256 running requests about 10 KiB each. Further ones are counted as dropped."""


CLOSE_SECONDS = 5.0
"""How long `close` waits for a write in progress; a peer that was stopped while it held the file must not hang us."""


class Recorder:
    """Takes records from the serving thread and appends one JSON line an interval and engine."""

    def __init__(self, config: StatLoggerConfig, model: str, engines: Iterable[int] = (0,)) -> None:
        """Open the file and start the thread; `engines` have a line each, also while only others are busy.

        Raises:
            OSError: the file cannot be written.
        """
        if config.path is None:
            msg = "a Recorder needs a path; without one nothing is recorded."
            raise ValueError(msg)
        self._writer = LineWriter(config.path)
        self._interval = config.interval
        self._model = model
        self._pid = os.getpid()
        self._engines = set(engines)
        self._queue: deque[tuple[float, int, Any, Any, Any] | str] = deque()
        self._dropped = 0
        self._open_spans()
        self._stop = threading.Event()
        self._read_failed = self._write_failed = False
        self._thread = threading.Thread(target=self._run, name="npu-statlogger", daemon=True)
        self._thread.start()

    def put(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any, engine: int = 0) -> None:
        """Keep references to one step's records; any of them may be None. Never blocks, never raises."""
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append((time.time(), engine, scheduler_stats, iteration_stats, mm_cache_stats))
        else:
            self._dropped += 1

    def put_event(self, name: str) -> None:
        """Count something that happens rarely, such as a sleep or a rejected request."""
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append(name)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write what is left and close the file; a second call, or one in a forked child, does nothing."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "The file of statistics did not take a line within %s s; the last one is lost.", CLOSE_SECONDS
            )
            return
        self._fold()
        self._write()
        self._writer.close()

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stop.wait(min(FOLD_SECONDS, self._interval)):
            self._fold()
            if time.monotonic() >= due:
                self._write()
                due = time.monotonic() + self._interval

    def _fold(self) -> None:
        """Empty the queue into the open spans."""
        batches: defaultdict[int | None, fold.Batch] = defaultdict(fold.Batch)
        while self._queue:
            try:
                _fold_one(batches, self._queue.popleft())
            except Exception:  # a record of an unknown shape must not end the thread; the line says how many there were
                if not self._read_failed:
                    logger.exception("A record could not be read; the lines count such records as records_failed.")
                self._read_failed = True
                batches[None].counters["records_failed"] += 1
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            batches[None].counters["records_dropped"] += dropped
        for engine, batch in batches.items():
            if engine not in self._spans:
                self._spans[engine] = self._span(engine)
            self._spans[engine].add(batch, engine)

    def _write(self) -> None:
        """Append the open spans as lines and begin the next ones; keep them open if that fails."""
        if not any(self._spans.values()):
            self._open_spans()
            return
        end = time.time()
        for span in self._spans.values():
            span.end = end
        try:
            self._writer.append(*(span.to_dict() for engine, span in self._spans.items() if span or engine is not None))
        except OSError as error:
            if not self._write_failed:
                logger.warning("Statistics could not be written (%s); they are kept and written later.", error)
            self._write_failed = True
            return
        self._write_failed = False
        self._open_spans()

    def _open_spans(self) -> None:
        """Begin a span for each engine; None is what belongs to no engine."""
        self._spans: dict[int | None, Snapshot] = {key: self._span(key) for key in (*sorted(self._engines), None)}

    def _span(self, engine: int | None) -> Snapshot:
        return Snapshot(
            start=time.time(),
            processes={f"{socket.gethostname()}:{self._pid}"},
            models={self._model},
            engines=set() if engine is None else {engine},
        )


def _fold_one(batches: defaultdict[int | None, fold.Batch], record: tuple[float, int, Any, Any, Any] | str) -> None:
    if isinstance(record, str):
        batches[None].counters[record] += 1
        return
    arrived, engine, scheduler_stats, iteration_stats, mm_cache_stats = record
    if scheduler_stats is not None:
        fold.fold_scheduler(batches[engine], scheduler_stats, arrived)
    if iteration_stats is not None:
        fold.fold_iteration(batches[engine], iteration_stats)
    if mm_cache_stats is not None:  # of this process, whichever engine's step brings it
        fold.fold_mm_cache(batches[None], mm_cache_stats)
