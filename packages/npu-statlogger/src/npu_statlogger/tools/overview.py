"""What `report` and `top` show of a run: its figures in sum, over time, by engine, and what is out of the ordinary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.notes import Finding, find
from npu_statlogger.tools.timeline import Timeline

if TYPE_CHECKING:
    from npu_statlogger.lines import Note

__all__ = ["Overview"]

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
        self._spans, self._engines = spans, engines

    def add(self, line: Snapshot) -> None:
        """Take in one interval line."""
        self.lines += 1
        self.whole.merge(line)
        self.timeline.add(line)
        if len(line.engines) != 1:
            return
        (engine,) = line.engines
        if engine not in self.engines and len(self.engines) >= self._engines:
            return
        self.engines.setdefault(engine, Snapshot()).merge(line)
        self.timelines.setdefault(engine, Timeline(self._spans, means=names.LOAD)).add(line)

    def add_note(self, note: Note) -> None:
        """Take in what the logger itself had to say."""
        if len(self.notes) < _NOTES:
            self.notes.append(note)
        else:
            self.notes_left_out += 1

    def findings(self) -> list[Finding]:
        """Return what is out of the ordinary, in the order of time, with the logger's own notes."""
        engines = {engine: list(timeline) for engine, timeline in sorted(self.timelines.items())}
        found = find(list(self.timeline), engines, self.whole)
        found += [Finding(note.name, note.time, note.time, note.text) for note in self.notes]
        if self.notes_left_out:
            text = f"{self.notes_left_out} more notes of the logger"
            found.append(Finding("notes", self.whole.start, self.whole.end, text))
        return sorted(found, key=lambda finding: finding.start)
