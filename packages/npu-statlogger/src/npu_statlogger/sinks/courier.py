"""Brings lines to one sink: a bounded mailbox, and the thread that empties it.

What waits while a sink stalls or fails stays within bounds without losing a count: interval lines of an engine merge
into one, which is exact. Lines of requests and steps do not merge; beyond LIMIT the newest are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from npu_statlogger.lines import Line
    from npu_statlogger.sinks.base import Sink

__all__ = ["LIMIT", "Courier"]

logger = logging.getLogger("vllm.npu_statlogger")

LIMIT = 16384
"""Lines of requests and steps that wait for one sink, about 1 KiB each."""

_LONGEST_PAUSE = 30.0


class Courier:
    """One sink's mailbox and thread."""

    def __init__(self, sink: Sink, dropped: Callable[[str, int], None]) -> None:
        """Start the thread; `dropped(name, lines)` is called for lines that found the mailbox full."""
        self.sink = sink
        self._dropped = dropped
        self._lock = threading.Lock()
        self._snapshots: dict[tuple[int, ...], Snapshot] = {}
        self._records: deque[Line] = deque()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=f"npu-statlogger-{sink.name}", daemon=True)
        self._thread.start()

    def publish(self, lines: Iterable[Line]) -> None:
        """Put lines into the mailbox; waits for nothing but the mailbox's other side."""
        full = 0
        with self._lock:
            for line in lines:
                if isinstance(line, Snapshot):
                    self._keep(line)
                elif len(self._records) < LIMIT:
                    self._records.append(line)
                else:
                    full += 1
        if full:
            self._dropped(self.sink.name, full)
        self._ready.set()

    def stop(self) -> None:
        """Let the thread bring what is left, and end."""
        self._stop.set()
        self._ready.set()

    def join(self, deadline: float) -> bool:
        """Wait for the thread until `deadline` (of time.monotonic) and return whether it has brought everything."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive() and not (self._snapshots or self._records)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._ready.wait()
            self._ready.clear()
            if not self._bring():
                self._stop.wait(min(_LONGEST_PAUSE, 0.25 * 2 ** min(self._failures, 8)))
                self._ready.set()
        self._bring()
        try:
            self.sink.close()
        except Exception as error:  # noqa: BLE001 # as below
            logger.warning(
                "Statistics: %s could not be closed (%s: %s); what it held back is lost.",
                self.sink.name, type(error).__name__, error,
            )  # fmt: skip

    def _bring(self) -> bool:
        """Empty the mailbox into the sink, or put everything back."""
        with self._lock:
            snapshots, records = self._snapshots, self._records
            self._snapshots, self._records = {}, deque()
        if not (snapshots or records):
            return True
        try:
            self.sink.write([*snapshots.values(), *records])
        except Exception as error:  # noqa: BLE001 # whatever a sink's library raises must not end its thread
            self._put_back(snapshots, records, error)
            return False
        if self._failures:
            logger.info("Statistics reach %s again.", self.sink.name)
        self._failures = 0
        return True

    def _put_back(self, snapshots: dict[tuple[int, ...], Snapshot], records: deque[Line], error: Exception) -> None:
        if not self._failures:
            logger.warning(
                "Statistics could not be written to %s (%s: %s); they are kept, merged, and written later.",
                self.sink.name, type(error).__name__, error,
            )  # fmt: skip
        self._failures += 1
        with self._lock:
            later, self._records = self._records, records
            for snapshot in snapshots.values():
                self._keep(snapshot)
            room = LIMIT - len(self._records)
            full = max(0, len(later) - room)
            self._records.extend(list(later)[:room])
        if full:
            self._dropped(self.sink.name, full)

    def _keep(self, line: Snapshot) -> None:
        """Add an interval line to what waits of its engine; the line itself may be shared and stays as it is."""
        key = tuple(sorted(line.engines))
        waiting = self._snapshots.get(key)
        if waiting is None:
            self._snapshots[key] = line
            return
        merged = Snapshot()
        merged.merge(waiting)
        merged.merge(line)
        self._snapshots[key] = merged
