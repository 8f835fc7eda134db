"""Reading files: kinds, damage, compression, and what was rotated away."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.errors import FormatError
from npu_statlogger.lines import Note
from npu_statlogger.reading import files_of, read_lines, read_snapshots
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

INTERVAL = Snapshot(start=0, end=1, processes={"host:1"}).to_dict()
NOTE = Note(time=1.0, process="host:1", name="clock_jumped", text="back by 3 s").to_dict()


def text(*lines: dict[str, object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_every_kind_is_read_and_snapshots_alone_if_asked(path: Path) -> None:
    path.write_bytes(text(INTERVAL, NOTE) + b"damaged\n" + text(INTERVAL) + b'{"schema"')
    assert [type(line) for line in read_lines(path)] == [Snapshot, Note, FormatError, Snapshot]
    assert [type(line) for line in read_snapshots(path)] == [Snapshot, FormatError, Snapshot]


def test_a_compressed_file_is_read_and_one_cut_short_says_so(path: Path) -> None:
    packed = gzip.compress(text(*[INTERVAL] * 2000))
    path.write_bytes(packed)
    assert sum(isinstance(line, Snapshot) for line in read_lines(path)) == 2000
    path.write_bytes(packed[: len(packed) // 2])
    *lines, last = read_lines(path)
    assert isinstance(last, FormatError)
    assert "the rest of the file is damaged" in str(last)
    assert all(isinstance(line, Snapshot) for line in lines)


def test_a_missing_file_is_an_error_of_the_system(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_lines(path))


def test_the_files_of_a_path_are_those_rotated_away_and_itself(path: Path) -> None:
    old = [f"{path.name}.20261122T201500.000001Z.gz", f"{path.name}.20261122T201501.000000Z"]
    for name in [*old, path.name, f"{path.name}.bak", f"{path.name}.notes.txt"]:
        path.with_name(name).touch()
    assert [each.name for each in files_of(path)] == [*old, path.name]
    path.unlink()
    assert [each.name for each in files_of(path)] == old
