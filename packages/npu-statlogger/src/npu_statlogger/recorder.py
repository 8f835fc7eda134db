"""The background half: a bounded queue that costs the caller one append, and the thread that folds and publishes.

The thread wakes every FOLD_SECONDS, so that the queue stays short, and gives each sink's courier the lines of single
requests and steps at once, and a line for each engine every `interval` seconds if anything happened.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npu_statlogger import fold
from npu_statlogger.connectors import Payloads, fold_connectors, own_payloads
from npu_statlogger.lines import Line, Note, Run
from npu_statlogger.metrics import labelled
from npu_statlogger.records import Sampler
from npu_statlogger.sinks import open_sinks
from npu_statlogger.sinks.courier import Courier
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.versions import VLLM, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from npu_statlogger.config import StatLoggerConfig

__all__ = ["FOLD_SECONDS", "QUEUE_LIMIT", "Recorder"]

# vLLM puts its handlers on the logger "vllm"; a name below it is enough and needs no import of vLLM.
logger = logging.getLogger("vllm.npu_statlogger")

FOLD_SECONDS = 1.0
QUEUE_LIMIT = 4096
"""Records kept between two wake-ups; at 256 running requests about 10 KiB each. Further ones are counted as dropped."""

CLOSE_SECONDS = 5.0
"""How long `close` waits for all sinks together; a peer that was stopped while it held the file must not hang us."""

_CLOCK_SECONDS = 1.0
"""How far the clock may run from the steady one within an interval before it counts as set."""

Record = tuple[float, int, Any, Any, Any, Payloads | None]


class Recorder:
    """Takes records from the serving thread and publishes their figures to the sinks."""

    def __init__(
        self,
        config: StatLoggerConfig,
        model: str,
        engines: Iterable[int] = (0,),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the sinks and start the threads.

        Args:
            config: names at least one sink.
            model: name as served.
            engines: those that have a line each, also while only others are busy.
            settings: further settings for the line that says who writes.

        Raises:
            ConfigError: a sink's library is missing, or a file belongs to somebody else.
            OSError: a file cannot be written.
        """
        if not config.on:
            msg = "a Recorder needs a path or another sink; without one nothing is recorded."
            raise ValueError(msg)
        self._interval = config.interval
        self._model, self._engines, self._pid = model, set(engines), os.getpid()
        self._process = f"{socket.gethostname()}:{self._pid}"
        self._sampler = Sampler(config, self._process, model)
        self._queue: deque[Record | tuple[str, int]] = deque()
        self._dropped = 0
        self._sleep: dict[str, float] = {}
        self._adapters: defaultdict[int, set[str]] = defaultdict(set)
        sinks = open_sinks(config, self._run_line(config, settings))
        self._couriers = [Courier(sink, self._count_dropped) for sink in sinks]
        self._open_spans()
        self._stop = threading.Event()
        self._read_failed = False
        self._thread = threading.Thread(target=self._run, name="npu-statlogger", daemon=True)
        self._thread.start()

    def put(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any, engine: int = 0) -> None:
        """Keep one step's records, any of which may be None; vLLM leaves them alone. Never blocks, never raises."""
        if len(self._queue) < QUEUE_LIMIT:
            payloads = own_payloads(scheduler_stats)
            self._queue.append((time.time(), engine, scheduler_stats, iteration_stats, mm_cache_stats, payloads))
        else:
            self._dropped += 1

    def put_event(self, name: str, amount: int = 1) -> None:
        """Count something that happens rarely, such as a sleep or a rejected request."""
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append((name, amount))
        else:
            self._dropped += 1

    def put_sleep(self, level: int | None) -> None:
        """Note a change of the sleep state: asleep at `level`, or None for awake."""
        self.put_event(labelled("sleep_events", "awake" if level is None else f"level_{level}"))
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        self._sleep = {labelled("engine_sleep_state", state): float(held) for state, held in states.items()}

    def close(self) -> None:
        """Publish what is left and close the sinks; a second call, or one in a forked child, does nothing."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        self._thread.join(CLOSE_SECONDS)
        self._fold()
        self._publish()
        for courier in self._couriers:
            courier.stop()
        late = [courier.sink.name for courier in self._couriers if not courier.join(deadline)]
        if late:
            logger.warning("Statistics: %s did not take the last lines; they are lost.", ", ".join(late))

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while not self._stop.wait(min(FOLD_SECONDS, max(0.0, due - time.monotonic()))):
            self._fold()
            if time.monotonic() >= due:
                self._publish()
                due = time.monotonic() + self._interval

    def _fold(self) -> None:
        """Empty the queue into the open spans, and publish lines of single requests and steps."""
        batches: defaultdict[int | None, fold.Batch] = defaultdict(fold.Batch)
        lines: list[Line] = []
        while self._queue:
            try:
                lines += self._fold_one(batches, self._queue.popleft())
            except Exception as error:  # noqa: BLE001 # a record of an unknown shape must not end the thread
                self._tell_failure(error)
                batches[None].counters["records_failed"] += 1
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            batches[None].counters["records_dropped"] += dropped
        for engine, batch in batches.items():
            if engine not in self._spans:
                self._spans[engine] = self._span(engine)
            try:
                self._spans[engine].add(batch, engine)
            except Exception as error:  # noqa: BLE001 # as above; what the finished requests hold is read here
                self._tell_failure(error)
                self._spans[None].counters["records_failed"] += 1
        self._give(lines)

    def _tell_failure(self, error: Exception) -> None:
        if not self._read_failed:
            text = "A record could not be read; the lines count such records as records_failed."
            logger.error(text, exc_info=error)
        self._read_failed = True

    def _fold_one(
        self, batches: defaultdict[int | None, fold.Batch], record: Record | tuple[str, int]
    ) -> Iterable[Line]:
        if len(record) == 2:
            batches[None].counters[record[0]] += record[1]
            return ()
        arrived, engine, scheduler_stats, iteration_stats, mm_cache_stats, payloads = record
        if scheduler_stats is not None:
            fold.fold_scheduler(batches[engine], scheduler_stats, arrived, self._adapters[engine])
        if payloads is not None:
            fold_connectors(batches[engine], payloads, arrived)
        if iteration_stats is not None:
            fold.fold_iteration(batches[engine], iteration_stats)
        if mm_cache_stats is not None:  # of this process, whichever engine's step brings it
            fold.fold_mm_cache(batches[None], mm_cache_stats)
        if not self._sampler.on:
            return ()
        step = self._sampler.step(engine, arrived, scheduler_stats, iteration_stats)
        return [*step, *self._sampler.requests(engine, arrived, iteration_stats)]

    def _publish(self) -> None:
        """Give the open spans to the sinks as lines, and begin the next ones; an idle server has none."""
        if any(self._spans.values()):
            end, seconds = time.time(), time.monotonic() - self._begun
            jump = end - self._start - seconds
            if abs(jump) > _CLOCK_SECONDS:
                self._give([self._clock_note(end, jump)])
            for span in self._spans.values():
                span.start, span.end = end - seconds, end
            for name, value in self._sleep.items():
                self._spans[None].gauges[""][name] = (end, value)
            self._give([span for engine, span in self._spans.items() if span or engine is not None])
        self._open_spans()

    def _give(self, lines: list[Line]) -> None:
        for courier in self._couriers if lines else ():
            courier.publish(lines)

    def _count_dropped(self, sink: str, lines: int) -> None:
        self.put_event(labelled("sink_lines_dropped", sink), lines)

    def _open_spans(self) -> None:
        """Begin a span for each engine; None is what belongs to no engine."""
        self._start, self._begun = time.time(), time.monotonic()
        self._spans: dict[int | None, Snapshot] = {key: self._span(key) for key in (*sorted(self._engines), None)}

    def _span(self, engine: int | None) -> Snapshot:
        return Snapshot(
            start=self._start,
            processes={self._process},
            models={self._model},
            engines=set() if engine is None else {engine},
        )

    def _run_line(self, config: StatLoggerConfig, settings: Mapping[str, Any] | None) -> Run:
        ours = {name: value for name, value in asdict(config).items() if value} | config.places()
        return Run(
            time=time.time(),
            process=self._process,
            model=self._model,
            versions={"npu-statlogger": version_of("npu-statlogger") or "", "vllm": version_of(*VLLM) or ""},
            engines=sorted(self._engines),
            settings={**ours, **(settings or {})},
        )

    def _clock_note(self, now: float, jump: float) -> Note:
        way = "forward" if jump > 0 else "back"
        text = f"The clock was set {way} by {abs(jump):.1f} s; the lines of this interval are of the new time."
        return Note(time=now, process=self._process, name="clock_jumped", text=text, values={"seconds": jump})
