"""Setting files aside: by size, by time, by somebody else; with several writers, and after a crash in between."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from npu_statlogger import jsonl
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.errors import ConfigError
from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.lines import Run
from npu_statlogger.reading import files_of, read_lines, read_snapshots
from npu_statlogger.recorder import Recorder
from npu_statlogger.rotation import Rotation, rotated_files
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

APPEND = """
import sys
from collections import Counter
from pathlib import Path
from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.recorder import Recorder
from npu_statlogger.rotation import Rotation
from npu_statlogger.snapshot import Snapshot
writer = LineWriter(Path(sys.argv[1]), rotation=Rotation(size=4000))
for _ in range(int(sys.argv[2])):
    writer.append(encode(Snapshot(start=0, end=1, counters=Counter(num_preemptions=1))))
"""


def line(count: int = 1) -> bytes:
    return encode(Snapshot(start=0, end=1, counters=Counter(num_preemptions=count)))


def run(time: float) -> bytes:
    return encode(Run(time=time, process="host:1", model="m", versions={}, engines=[0], settings={}))


def counts(path: Path) -> list[int]:
    snapshots = [snapshot for file in files_of(path) for snapshot in read_snapshots(file)]
    return [snapshot.counters["num_preemptions"] for snapshot in snapshots if isinstance(snapshot, Snapshot)]


def test_a_file_of_the_size_is_set_aside_compressed_and_nothing_is_lost(path: Path) -> None:
    writer = LineWriter(path, rotation=Rotation(size=1000), first=lambda: run(time.time()))
    for number in range(1, 21):
        writer.append(line(number))
    assert counts(path) == list(range(1, 21))
    old = rotated_files(path)
    assert len(old) >= 3
    assert all(each.suffix == ".gz" and each.stat().st_mode & 0o777 == 0o600 for each in old)
    assert all(gzip.decompress(each.read_bytes()).endswith(b"\n") for each in old)
    assert all(isinstance(next(iter(read_lines(each))), Run) for each in files_of(path))


def test_only_the_newest_are_kept(path: Path) -> None:
    writer = LineWriter(path, rotation=Rotation(size=1, keep=2, compress=False))
    for number in range(1, 8):
        writer.append(line(number))
    assert counts(path) == [5, 6, 7]


def test_a_name_may_hold_a_patterns_characters(tmp_path: Path) -> None:
    path = tmp_path / "stats[1]*?.jsonl"
    writer = LineWriter(path, rotation=Rotation(size=1, keep=2))
    for count in range(1, 6):
        writer.append(line(count))
    assert len(rotated_files(path)) == 2
    assert counts(path)[-1] == 5


def test_a_period_that_is_over_sets_the_file_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [86_400.0 * 10 - 1]
    monkeypatch.setattr(jsonl.time, "time", lambda: now[0])
    writer = LineWriter(path, rotation=Rotation(seconds=86_400), first=lambda: run(now[0]))
    for later in (0, 0.5, 1, 2, -3600, 86_401):  # the day ends after a second; then the clock is set back by an hour
        now[0] = 86_400.0 * 10 - 1 + later
        writer.append(line())
    assert [sum(1 for _ in read_snapshots(file)) for file in files_of(path)] == [2, 3, 1]
    assert [file.name.removeprefix(f"{path.name}.")[:15] for file in rotated_files(path)] == [
        "19700111T000000",
        "19700112T000000",
    ]


def test_a_logger_sets_its_file_aside_once_a_period_and_not_at_every_line(path: Path) -> None:
    config = StatLoggerConfig(path, interval=0.1, rotate_hours=1 / 3600, compress=False)
    recorder, begun = Recorder(config, "m"), time.time()
    while time.time() < begun + 4:
        recorder.put_event("num_preemptions")
        time.sleep(0.02)
    recorder.close()
    files = files_of(path)
    assert 3 <= len(files) <= 2 + time.time() - begun
    assert all(isinstance(next(iter(read_lines(each))), Run) for each in files)


def test_writers_of_several_processes_share_a_file_that_is_set_aside_many_times(path: Path) -> None:
    command = [sys.executable, "-c", APPEND, str(path), "60"]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0, 0]
    assert counts(path) == [1] * 180
    assert len(rotated_files(path)) > 5


@pytest.mark.parametrize("create", [True, False])
def test_a_file_that_logrotate_moved_is_left_and_a_new_one_begun(path: Path, create: bool) -> None:
    writer = LineWriter(path, first=lambda: run(1.0))
    writer.append(line(1))
    path.rename(path.with_name("moved"))
    if create:
        path.touch(mode=0o640)
    writer.append(line(2))
    writer.append(line(3))
    assert [type(each).__name__ for each in read_lines(path)] == ["Run", "Snapshot", "Snapshot"]
    assert counts(path) == [2, 3]


def test_copytruncate_of_logrotate_works_too(path: Path) -> None:
    writers = [LineWriter(path, first=lambda: run(1.0)) for _ in range(2)]
    for writer in writers:
        writer.append(line(1))
    os.truncate(path, 0)
    for writer in (*writers, *writers):
        writer.append(line(2))
    assert counts(path) == [2, 2, 2, 2]
    assert [type(each).__name__ for each in read_lines(path)] == ["Run", "Snapshot", "Run", *["Snapshot"] * 3]


def test_somebody_else_s_file_in_our_place_is_refused_and_ours_is_not_lost(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    path.unlink()
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="holds something else"):
        writer.append(line(2))
    assert path.read_text() == "a letter"
    path.unlink()
    writer.append(line(2))
    assert counts(path) == [2]


def test_a_crash_while_compressing_loses_and_doubles_nothing(path: Path) -> None:
    writer = LineWriter(path, rotation=Rotation(size=1, compress=False))
    for number in (1, 2, 3):
        writer.append(line(number))
    first, second = rotated_files(path)
    first.with_name(first.name + ".part").write_bytes(b"half a file")  # killed before the rename
    second.with_name(second.name + ".gz").write_bytes(gzip.compress(second.read_bytes()))  # killed after it
    assert counts(path) == [1, 2, 3]
    Rotation().tidy(path)
    assert [file.suffix for file in rotated_files(path)] == [".gz", ".gz"]
    assert counts(path) == [1, 2, 3]
    assert not second.exists()


def test_what_cannot_be_tidied_up_stays_and_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = LineWriter(path, rotation=Rotation(size=1))
    writer.append(line(1))
    (path.parent / "blocker").mkdir()
    stamp = path.with_name(f"{path.name}.20260101T000000.000000Z")
    stamp.write_bytes(line(7))
    stamp.with_name(stamp.name + ".part").mkdir()
    writer.append(line(2))
    assert "could not be tidied up" in caplog.text
    assert counts(path)[0] == 7
    assert counts(path)[-1] == 2
