"""What npu-stat reads: all that is whole, and a word about the rest."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npu_statlogger.cli import main
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.errors import InputError, NoLinesError
from npu_statlogger.lines import Note, Run
from npu_statlogger.sinks.jsonl import open_sink
from npu_statlogger.tools.charts import plots
from npu_statlogger.tools.follow import Follower
from npu_statlogger.tools.overview import Overview
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., Path]


def test_compressed_lines_are_the_same_lines(write_run: Write, tmp_path: Path) -> None:
    plain = write_run(lines=5)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    lines = [[line.to_dict() for line in Reading([file])] for file in (plain, packed)]
    assert len(lines[0]) == 5
    assert lines[0] == lines[1]


def test_what_was_rotated_away_is_read_first(write_run: Write, tmp_path: Path) -> None:
    path = write_run(lines=6)
    first, rest = path.read_text().splitlines(keepends=True)[:2], path.read_text().splitlines(keepends=True)[2:]
    (tmp_path / "run.jsonl.20261122T201500.123456Z.gz").write_bytes(gzip.compress("".join(first).encode()))
    path.write_text("".join(rest))
    assert [line.start % 100 for line in Reading([path]).snapshots()] == [0, 10, 20, 30, 40, 50]


def test_a_compressed_file_that_breaks_off_gives_its_whole_lines(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(write_run(lines=50).read_bytes())[:-2000])
    reading = Reading([packed])
    assert 0 < len(list(reading)) < 50
    assert reading.left_out == {"damaged": 1}
    assert "the rest of the file is damaged" in capsys.readouterr().err


def test_ten_thousand_torn_files_are_read_and_counted(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = write_run(lines=1, requests=2).read_text()
    folder = tmp_path / "torn"
    folder.mkdir()
    for index in range(10_000):
        (folder / f"{index}.jsonl").write_text((line if index % 100 == 0 else "") + line[: 7 + index % 90])
    assert main(["summary", "--json", *map(str, sorted(folder.iterdir()))]) == 0
    output = capsys.readouterr()
    merged = json.loads(output.out)
    assert merged["counters"]["request_success.length"] == 200
    assert merged["left_out"] == {"torn": 10_000}
    assert len(output.err.splitlines()) == 6
    assert "10000 lines left out in all" in output.err


@pytest.mark.parametrize(
    "damage", [b"{}\n", b"\xff\xfe\n", b'{"schema":"npu-statlogger/99"}\n', b"[1]\n", b"\n", b"[" * 100_000 + b"\n"]
)
def test_a_damaged_line_is_named(write_run: Write, damage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(lines=2)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    reading = Reading([path])
    assert len(list(reading)) == 2
    assert reading.left_out == {"damaged": 1}
    assert f"{path}:2: left out" in capsys.readouterr().err


def test_a_line_at_no_time_is_damaged(write_run: Write) -> None:
    path = write_run(lines=2)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | {'end': float('inf')})}\n")
    reading = Reading([path])
    assert len(list(reading)) == 1
    assert reading.left_out == {"damaged": 1}


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot read {tmp_path / 'none'}: No such file"):
        Reading([tmp_path / "none"])
    with pytest.raises(InputError, match=f"cannot read {tmp_path}: Is a directory"):
        list(Reading([tmp_path]))


def test_files_without_a_whole_line_are_an_error_of_their_own(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(NoLinesError, match=f"no whole line in {empty}"):
        list(Reading([empty]))


@pytest.mark.parametrize("command", ["summary", "summary --json", "report", "report --json", "diff FILE"])
def test_a_server_without_traffic_so_far_is_told_in_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "idle.jsonl"
    sink = open_sink(
        StatLoggerConfig(path), Run(time=1.0, process="h:1", model="m", versions={}, engines=[0], settings={})
    )
    sink.write([Note(time=1.0, process="h:1", name="clock_jumped", text="")])
    sink.close()
    name, *options = command.replace("FILE", str(path)).split()
    assert main([name, str(path), *options]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("npu-stat: the files hold no interval line yet; the first comes after")


@pytest.mark.parametrize("command", ["summary", "report", "slo --ttft 1s", "merge", "tail", "top --once", "diff OTHER"])
def test_every_command_refuses_a_wrong_path_in_one_sentence(
    command: str, write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.replace("OTHER", str(write_run())).split()
    assert main([name, str(tmp_path / "none"), *options]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"npu-stat: cannot read {tmp_path / 'none'}: No such file or directory.\n"


def test_whatever_is_written_over_a_file_the_rest_is_read(make_load: type, as_text: Callable, tmp_path: Path) -> None:
    whole, path = as_text(make_load(lines=6, requests=3).snapshots()).encode(), tmp_path / "run"
    random = np.random.default_rng(17)
    for _ in range(60):
        text = bytearray(whole)
        damage = int(random.integers(1, 6))
        for place, length in random.integers((0, 1), (len(text), 20), (damage, 2)):
            text[place : place + length] = random.bytes(length)
        path.write_bytes(text)
        reading, overview = Reading([path]), Overview()
        with suppress(NoLinesError):
            for line in reading.snapshots():
                overview.add(line)
            assert overview.findings() is not None
            assert len(plots(overview, ())) > 0
        lines = bytes(text).count(b"\n") + (not text.endswith(b"\n"))
        assert reading.kinds.total() + reading.left_out.total() == lines
        assert reading.kinds.total() >= 6 - 2 * damage
        follower = Follower(path)
        follower.back(99)
        assert len(list(follower.poll())) + follower.damaged == bytes(text).count(b"\n")
        follower.close()
