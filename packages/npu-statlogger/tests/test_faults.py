"""What happens to disks and files: no line is lost but the one in flight, and the log says what is wrong."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.errors import ConfigError
from npu_statlogger.jsonl import _BEGIN, LineWriter, encode
from npu_statlogger.reading import files_of, read_lines
from npu_statlogger.recorder import Recorder
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator


def line(count: int) -> bytes:
    return encode(Snapshot(start=0, end=1, counters=Counter(num_preemptions=count)))


def counts(path: Path) -> list[int]:
    return [each.counters["num_preemptions"] for each in read_lines(path) if isinstance(each, Snapshot)]


@pytest.mark.parametrize("files", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_files_torn_anywhere_keep_every_whole_line_and_take_new_ones(path: Path, files: int) -> None:
    lines = [line(number) for number in range(1, 6)]
    whole = b"".join(lines)
    ends = [len(b"".join(lines[:number])) for number in range(6)]
    drawn = random.Random(7)
    for _ in range(files):
        cut = drawn.randrange(len(whole) + 1)
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends) - 1
        assert counts(path) == list(range(1, kept + 1))
        if 0 < cut < len(_BEGIN) // 2:  # it might be anybody's
            with pytest.raises(ConfigError, match="holds something else"):
                LineWriter(path)
            continue
        writer = LineWriter(path)
        writer.append(line(99))
        writer.close()
        assert counts(path) == [*range(1, kept + 1), 99], cut
        assert path.read_bytes() == whole[: ends[kept]] + line(99)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB, where the system lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_loses_nothing_once_there_is_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, ballast = small_disk / "stats.jsonl", small_disk / "ballast"
    recorder = Recorder(StatLoggerConfig(path, interval=0.1, rotate_mib=0.001), "m")
    ballast.write_bytes(b"x" * (256 * 1024 - 2 * 4096))
    for _ in range(300):  # more lines than fit
        recorder.put_event("num_preemptions")
        time.sleep(0.01)
    assert "No space left on device" in caplog.text
    ballast.unlink()
    recorder.close()
    assert sum(count for file in files_of(path) for count in counts(file)) == 300
    assert "they are kept, merged, and written later" in caplog.text


def test_a_disk_that_is_read_only_for_a_while_loses_nothing(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small_disk / "stats.jsonl"
    recorder = Recorder(StatLoggerConfig(path, interval=0.1), "m")
    path.unlink()  # as a rotation does at that moment; the file that is still open would keep the disk writable
    writer = recorder._couriers[0].sink._writer  # type: ignore[attr-defined]
    os.dup2(os.open(os.devnull, os.O_RDWR), writer._fd)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    recorder.put_event("num_preemptions", 5)
    deadline = time.monotonic() + 30
    while "Read-only file system" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    recorder.close()
    assert "Read-only file system" in caplog.text
    assert sum(counts(path)) == 5


def test_a_directory_that_cannot_be_written_stops_the_start_with_its_name() -> None:
    with pytest.raises(OSError, match="/sys/stats.jsonl"):
        Recorder(StatLoggerConfig(Path("/sys/stats.jsonl")), "m")
