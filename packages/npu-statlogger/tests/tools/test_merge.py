"""Merging files: in the order of time, exact in sum, in bounded memory and with few files open."""

from __future__ import annotations

import gzip
import json
import resource
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.cli import main
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[..., Path]


def whole(*paths: Path) -> dict[str, object]:
    merged = Snapshot()
    for path in paths:
        for snapshot in Reading([path]).snapshots():
            merged.merge(snapshot)
    return merged.to_dict()


def test_two_engines_of_two_api_servers_are_the_whole(write_run: Write, tmp_path: Path) -> None:
    parts = [
        write_run(f"{index}.jsonl", engines=2, lines=30, seed=index, start=1e9 + 3.3 * index, process=f"host:{index}")
        for index in range(2)
    ]
    out = tmp_path / "merged.jsonl"
    assert main(["merge", *map(str, parts), "-o", str(out), "--every", "1min"]) == 0
    assert whole(out) == whole(*parts)
    lines = list(Reading([out]).snapshots())
    assert len(lines) == 2 * 6  # engines x minutes that are touched
    assert [line.start for line in lines] == sorted(line.start for line in lines)
    assert {len(line.processes) for line in lines[2:-2]} == {2}
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_requests_and_unmerged_lines_stay_as_they_are(
    write_run: Write, tmp_path: Path, request_line: Callable, as_text: Callable
) -> None:
    run = write_run(lines=3)
    requests = tmp_path / "requests.jsonl"
    requests.write_text(as_text(request_line(arrival=1_795_376_400.0 + at, request_id=str(at)) for at in (1, 12)))
    out = tmp_path / "merged.jsonl"
    assert main(["merge", str(run), str(requests), "-o", str(out), "--every", "0"]) == 0
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds == ["interval", "request", "interval", "request", "interval"]
    assert sorted(out.read_text().splitlines()) == sorted((run.read_text() + requests.read_text()).splitlines())


def test_more_files_than_may_be_open(write_run: Write, tmp_path: Path) -> None:
    parts = [write_run(f"{index}.jsonl", lines=2, requests=3, seed=index) for index in range(230)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 120, hard))
    try:
        out = tmp_path / "merged.jsonl"
        assert main(["merge", *map(str, parts), "-o", str(out), "--every", "60s"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert whole(out) == whole(*parts)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("npu-stat-")]


def test_the_output_may_be_compressed(write_run: Write, tmp_path: Path) -> None:
    run, out = write_run(lines=4), tmp_path / "merged.jsonl.gz"
    assert main(["merge", str(run), "-o", str(out), "--every", "0"]) == 0
    assert gzip.decompress(out.read_bytes()) == run.read_bytes()


def test_a_file_that_is_there_stays(write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(lines=1), tmp_path / "there"
    out.write_text("mine")
    assert main(["merge", str(run), "-o", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_what_cannot_be_read_leaves_no_output(write_run: Write, tmp_path: Path) -> None:
    run, out = write_run(lines=1), tmp_path / "out"
    assert main(["merge", str(run), str(tmp_path / "none"), "-o", str(out)]) == 2
    (tmp_path / "empty").touch()
    assert main(["merge", str(tmp_path / "empty"), "-o", str(out)]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run.jsonl"]


def test_a_folder_that_is_not_there_is_named(
    write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(write_run(lines=1)), "-o", str(tmp_path / "none" / "out")]) == 2
    assert "cannot write" in capsys.readouterr().err
