"""A courier: what a sink does touches nobody else, and nothing is lost that can be kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest

from npu_statlogger.lines import Note
from npu_statlogger.sinks import courier as courier_module
from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.courier import Courier
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.lines import Line


class Taking(Sink):
    """Takes everything; `failures` times not."""

    name: ClassVar[str] = "taking"

    def __init__(self, failures: int = 0) -> None:
        self.lines: list[Line] = []
        self.failures = failures
        self.closed = threading.Event()

    def write(self, lines: Sequence[Line]) -> None:
        if self.failures:
            self.failures -= 1
            msg = "No space left on device"
            raise OSError(msg)
        self.lines += lines

    def close(self) -> None:
        self.closed.set()


class Stalling(Taking):
    """Takes nothing until it is let go."""

    name: ClassVar[str] = "stalling"

    def __init__(self) -> None:
        super().__init__()
        self.go, self.begun = threading.Event(), threading.Event()

    def write(self, lines: Sequence[Line]) -> None:
        self.begun.set()
        assert self.go.wait(60)
        super().write(lines)


def interval(engine: int = 0, count: int = 1) -> Snapshot:
    return Snapshot(start=0, end=1, engines={engine}, counters=Counter(num_preemptions=count))


def note() -> Note:
    return Note(time=1.0, process="h:1", name="clock_jumped", text="")


def end(*couriers: Courier) -> list[bool]:
    for courier in couriers:
        courier.stop()
    return [courier.join(time.monotonic() + 30) for courier in couriers]


def total(sink: Taking) -> int:
    return sum(line.counters["num_preemptions"] for line in sink.lines if isinstance(line, Snapshot))


def none_dropped(sink: str, lines: int) -> None:
    pytest.fail(f"{lines} lines dropped by {sink}")


def test_lines_reach_the_sink_and_it_is_closed() -> None:
    sink = Taking()
    courier = Courier(sink, none_dropped)
    courier.publish([interval(), note()])
    assert end(courier) == [True]
    assert (total(sink), len(sink.lines)) == (1, 2)
    assert sink.closed.is_set()


def test_a_stalling_sink_holds_up_nobody_and_loses_no_count() -> None:
    stalling, taking = Stalling(), Taking()
    couriers = [Courier(sink, none_dropped) for sink in (stalling, taking)]
    begin = time.monotonic()
    for _ in range(500):
        for courier in couriers:
            courier.publish([interval(0), interval(1)])
    assert time.monotonic() - begin < 30
    assert stalling.begun.wait(30)
    assert end(couriers[1]) == [True]
    assert total(taking) == 1000
    stalling.go.set()
    assert end(couriers[0]) == [True]
    assert total(stalling) == 1000
    assert len(stalling.lines) <= 4 + 2  # what waited merged into a line for each engine


def test_a_published_line_is_not_changed_by_merging() -> None:
    shared = interval()
    stalling = Stalling()
    courier = Courier(stalling, none_dropped)
    courier.publish([interval()])
    assert stalling.begun.wait(30)
    courier.publish([shared])
    courier.publish([interval()])
    stalling.go.set()
    assert end(courier) == [True]
    assert shared.counters["num_preemptions"] == 1
    assert total(stalling) == 3


def test_a_sink_that_fails_gets_everything_later_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Taking(failures=2)
    courier = Courier(sink, none_dropped)
    with caplog.at_level("INFO"):
        for _ in range(3):
            courier.publish([interval(), note()])
            time.sleep(0.1)
        deadline = time.monotonic() + 30
        while total(sink) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert end(courier) == [True]
    assert total(sink) == 3
    assert sum(isinstance(line, Note) for line in sink.lines) == 3
    assert caplog.text.count("could not be written to taking (OSError: No space left on device)") == 1
    assert caplog.text.count("Statistics reach taking again.") == 1


def test_lines_that_do_not_merge_are_dropped_beyond_a_limit_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "LIMIT", 10)
    dropped = Counter[str]()
    sink = Stalling()
    courier = Courier(sink, lambda name, lines: dropped.update({name: lines}))
    courier.publish([note()])
    assert sink.begun.wait(30)
    courier.publish([note() for _ in range(14)])
    assert dropped == {"stalling": 4}
    sink.go.set()
    assert end(courier) == [True]
    assert len(sink.lines) == 11


def test_a_sink_that_never_takes_anything_does_not_hold_up_the_end() -> None:
    courier = Courier(Taking(failures=10**9), none_dropped)
    courier.publish([interval()])
    courier.stop()
    assert not courier.join(time.monotonic() + 2)
