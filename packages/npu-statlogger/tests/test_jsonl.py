"""The file: lines are whole or absent, whatever happens to their writers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.errors import ConfigError, FormatError
from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.reading import read_snapshots
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

WRITE_FOREVER = """
import json, sys
from pathlib import Path
from npu_statlogger.jsonl import LineWriter, encode
writer = LineWriter(Path(sys.argv[1]))
while True:
    writer.append(json.dumps({"schema": "npu-statlogger/1", "start": 0, "end": 1, "processes": [], "models": ["x" * 300000], "engines": [0],
                   "counters": {"num_preemptions": 1}, "distributions": {}}, separators=(",", ":")).encode() + b"\\n")
"""


def line(preemptions: int = 1) -> bytes:
    return encode(Snapshot(start=0, end=1, counters=Counter(num_preemptions=preemptions)))


def preemptions(path: Path) -> list[int]:
    snapshots = list(read_snapshots(path))
    assert all(isinstance(snapshot, Snapshot) for snapshot in snapshots)
    return [snapshot.counters["num_preemptions"] for snapshot in snapshots if isinstance(snapshot, Snapshot)]


def test_lines_are_appended_and_read_back(path: Path) -> None:
    for count in (1, 2):
        writer = LineWriter(path)
        writer.append(line(count))
        writer.close()
    assert preemptions(path) == [1, 2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_tail_is_no_line_and_the_next_append_removes_it(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    for torn in ('{"schema":"npu-statlogger/1","start":' + "1" * 200_000, '{"sch'):
        with path.open("a") as file:
            file.write(torn)
    assert preemptions(path) == [1]
    writer.append(line(2))
    assert preemptions(path) == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_that_is_nothing_but_a_torn_line_starts_over(path: Path) -> None:
    path.write_text('{"schema":"npu-statlogger/1","models":["' + "y" * 100_000)
    LineWriter(path).append(line(3))
    assert preemptions(path) == [3]


@pytest.mark.parametrize(
    "content", [b'{"minified":"json"}', b"\x98\x04\0\0\0\0\0\0" + bytes(100_000), b"a\nlog\nof lines", b"\n", b"{"]
)
def test_somebody_else_s_file_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} holds something else"):
        LineWriter(path)
    assert path.read_bytes() == content


def test_what_others_write_into_our_file_is_not_cut(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    with path.open("a") as file:
        file.write("a note without its newline")
    writer.append(line(2))
    assert [type(snapshot) for snapshot in read_snapshots(path)] == [Snapshot, FormatError, Snapshot]
    assert path.read_text().splitlines()[1] == "a note without its newline"


def test_what_replaced_our_file_is_not_cut(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    path.write_bytes(b"x" * 70_000)
    writer.append(line(2))
    assert path.read_bytes().startswith(b"x" * 70_000)


def test_several_lines_are_written_together(path: Path) -> None:
    LineWriter(path).append(line(1), line(2))
    assert preemptions(path) == [1, 2]


def test_a_kill_in_the_middle_of_writing_leaves_whole_lines_only(path: Path) -> None:
    for round_number in range(5):
        before = path.stat().st_size if path.exists() else 0
        writers = [subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)]) for _ in range(2)]
        try:
            deadline = time.monotonic() + 60
            while (path.stat().st_size if path.exists() else 0) < before + 2_000_000:
                assert time.monotonic() < deadline, "the writers wrote nothing"
                time.sleep(0.001 * (round_number + 1))
        finally:
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
        assert preemptions(path)
        LineWriter(path).append(line())
        assert path.read_bytes().endswith(b"\n")
        assert all(json.loads(text)["schema"].startswith("npu-statlogger/") for text in path.read_text().splitlines())


def test_a_write_that_the_system_cuts_short_leaves_nothing_of_the_line(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.append(line(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert path.stat().st_size == size
    writer.append(line(3))
    assert preemptions(path) == [1, 3]


def test_a_damaged_line_in_the_middle_is_reported_and_the_rest_is_read(path: Path) -> None:
    writer = LineWriter(path)
    writer.append(line(1))
    with path.open("a") as file:
        file.write("not json\n")
    writer.append(line(2))
    kinds = [type(snapshot) for snapshot in read_snapshots(path)]
    assert kinds == [Snapshot, FormatError, Snapshot]


def test_a_pipe_is_refused(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="regular file"):
        LineWriter(path)
