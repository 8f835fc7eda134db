from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from npu_ops import other_work
from npu_ops.other_work import OtherWork

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """Return what writes the file of this process's one processor, 3, beside one that it may not use."""
    file = tmp_path / "stat"
    monkeypatch.setattr(other_work, "_STAT", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})

    def write(*seconds):
        times = " ".join(str(round(number * TICKS)) for number in seconds)
        file.write_text(f"cpu  1 2 3\ncpu2 900 900 900 0 0 0 0 0 0 0\ncpu3 {times}\nintr 5 cpu3\nctxt 7\n")

    write(*[0] * 10)
    return write


def test_all_but_idleness_and_guests_counts(stat):
    others = OtherWork()
    stat(1, 2, 4, 1000, 1000, 8, 16, 32, 500, 500)
    assert others.seconds == pytest.approx(63, abs=0.1)
    assert others.disturbs(1)


def test_what_always_runs_does_not_disturb(stat):
    others = OtherWork()
    time.sleep(0.5)
    stat(0.03, *[0] * 9)
    assert not others.disturbs(1)
    stat(0.5, *[0] * 9)
    assert others.disturbs(1)


def test_processors_that_are_left_are_for_others(stat, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    others = OtherWork()
    time.sleep(0.5)
    stat(0.4, *[0] * 9)
    assert others.disturbs(2)
    assert not others.disturbs(1)


def test_without_the_file_nobody_else_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(other_work, "_STAT", tmp_path / "none")
    others = OtherWork()
    assert others.seconds == 0
    assert not others.disturbs(100)


def busy():
    """Spin for half a second; return the seconds of a processor that it took."""
    end, before = time.monotonic() + 0.5, time.process_time()
    while time.monotonic() < end:
        pass
    return time.process_time() - before


def test_this_process_is_no_other(stat):
    others = OtherWork()
    stat(busy() + 0.2, *[0] * 9)
    assert others.seconds == pytest.approx(0.2, abs=0.03)


def test_another_process_is_seen():
    burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    others = OtherWork()
    busy()
    burning.kill()
    burning.wait()
    assert others.seconds >= 0.1
