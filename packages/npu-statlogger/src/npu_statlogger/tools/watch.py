"""Finding what is odd while lines pass by, so that what took a minute is found in a run of days.

Lines go through a window of spans as fine as they are; when it is full it is looked at, and its later half stays to
know what is ordinary in what follows.
"""

from __future__ import annotations

from dataclasses import replace

from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.notes import Finding, find
from npu_statlogger.tools.timeline import Timeline

__all__ = ["Watch"]

_SPANS = 240
_UNBOUNDED = 1 << 30
_KEPT = 100


class Watch:
    """Takes lines in, in about the order of time, and keeps a bounded number of findings."""

    def __init__(self, engines: int) -> None:
        self._findings: list[Finding] = []
        self._left_out = 0
        self._most_engines = engines
        self._begin()

    def add(self, line: Snapshot) -> None:
        """Take in one interval line."""
        if line.end < self._window.start and len(self._window):  # the next file begins
            self._look()
            self._begin()
        self._window.add(line)
        for engine in line.engines:
            if engine in self._engines or len(self._engines) < self._most_engines:
                self._engines.setdefault(engine, Timeline(_UNBOUNDED, means=names.LOAD)).add(line)
        if len(self._window) > _SPANS:
            self._look()
            middle = list(self._window)[_SPANS // 2].start
            for timeline in (self._window, *self._engines.values()):
                timeline.forget(middle)

    def findings(self, whole: Snapshot) -> list[Finding]:
        """Return what was found, with what the counters of the whole run say."""
        self._look()
        found = [*self._findings, *find([], {}, whole)]
        if self._left_out:
            text = f"{self._left_out} more findings; look at a part of the run for them"
            found.append(Finding("more", whole.end, whole.end, text))
        return found

    def _begin(self) -> None:
        self._window = Timeline(_UNBOUNDED, sketches=names.LATENCIES, means=names.LOAD)
        self._engines: dict[int, Timeline] = {}

    def _look(self) -> None:
        engines = {engine: list(timeline) for engine, timeline in sorted(self._engines.items())}
        for finding in find(list(self._window), engines, Snapshot()):
            self._keep(finding)

    def _keep(self, finding: Finding) -> None:
        """Add a finding, or what it adds to one that an earlier look has seen the beginning of."""
        for index, known in enumerate(reversed(self._findings), start=1):
            same = (known.kind, known.engine) == (finding.kind, finding.engine)
            if same and finding.start <= known.end and known.start <= finding.end:
                self._findings[-index] = _joined(known, finding)
                return
        if len(self._findings) < _KEPT:
            self._findings.append(finding)
        else:
            self._left_out += 1


def _joined(first: Finding, second: Finding) -> Finding:
    """Return one finding for two looks at the same thing, in the words of the longer look."""
    longer = max(first, second, key=lambda finding: finding.end - finding.start)
    return replace(longer, start=min(first.start, second.start), end=max(first.end, second.end))
