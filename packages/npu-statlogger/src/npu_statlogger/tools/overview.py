"""What `report` and `top` show of a run: its figures in sum, over time, by engine, and what is out of the ordinary."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.notes import Finding
from npu_statlogger.tools.timeline import Timeline
from npu_statlogger.tools.watch import Watch

if TYPE_CHECKING:
    from npu_statlogger.lines import Note, RequestLine

__all__ = ["Overview"]

_SLOWEST = 10
_NOTES = 50
"""Notes of the logger that are kept; further ones are counted."""


class Overview:
    """Takes lines in and keeps a bounded amount, whatever their number; of many engines the first are kept apart."""

    def __init__(self, spans: int = 240, engines: int = 16) -> None:
        self.whole = Snapshot()
        self.timeline = Timeline(spans, sketches=names.LATENCIES, means=names.LOAD)
        self.engines: dict[int, Snapshot] = {}
        self.timelines: dict[int, Timeline] = {}
        self.notes: list[Note] = []
        self.notes_left_out = 0
        self.lines = 0
        self._slowest: list[tuple[float, int, RequestLine]] = []
        self._requests = 0
        self._spans, self._engines = spans, engines
        self._watch = Watch(engines)

    def add(self, line: Snapshot) -> None:
        """Take in one interval line."""
        self.lines += 1
        self.whole.merge(line)
        self.timeline.add(line)
        self._watch.add(line)
        if len(line.engines) != 1:
            return
        (engine,) = line.engines
        if engine not in self.engines and len(self.engines) >= self._engines:
            return
        self.engines.setdefault(engine, Snapshot()).merge(line)
        self.timelines.setdefault(engine, Timeline(self._spans, means=names.LOAD)).add(line)

    def add_request(self, line: RequestLine) -> None:
        """Take in a request's line, to keep the slowest of them."""
        self._requests += 1
        entry = (line.e2e_seconds, self._requests, line)
        if len(self._slowest) < _SLOWEST:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)

    def slowest(self) -> list[RequestLine]:
        """Return the requests that took longest, the slowest first."""
        return [line for _, _, line in sorted(self._slowest, reverse=True)]

    def add_note(self, note: Note) -> None:
        """Take in what the logger itself had to say."""
        if len(self.notes) < _NOTES:
            self.notes.append(note)
        else:
            self.notes_left_out += 1

    def findings(self) -> list[Finding]:
        """Return what is out of the ordinary, in the order of time, with the logger's own notes."""
        found = self._watch.findings(self.whole)
        found += [Finding(note.name, note.time, note.time, note.text) for note in self.notes]
        if self.notes_left_out:
            text = f"{self.notes_left_out} more notes of the logger"
            found.append(Finding("notes", self.whole.start, self.whole.end, text))
        return sorted(found, key=lambda finding: finding.start)
