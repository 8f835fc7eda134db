"""Following a file that is written, cut, rotated and torn; and the commands that do: tail and top."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_statlogger.cli import main
from npu_statlogger.errors import InputError
from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.lines import Note
from npu_statlogger.tools.follow import Follower
from npu_statlogger.tools.top import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[..., Path]

START = 1_795_376_400.0
NOTE = encode(Note(time=START, process="h:1", name="clock_jumped", text="")).decode().strip()


def starts(follower: Follower) -> list[int]:
    """Return the numbers of the lines that a poll gives."""
    return [round((line.start - START) / 10) for line in follower.poll()]


def parts(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("back", "expected"), [(0, []), (1, [9]), (4, [6, 7, 8, 9]), (10, [*range(10)]), (99, [*range(10)])]
)
def test_going_back_by_lines(back: int, expected: list[int], write_run: Write) -> None:
    follower = Follower(write_run(lines=10))
    follower.back(back)
    assert starts(follower) == expected
    assert starts(follower) == []


def test_going_back_by_lines_longer_than_a_block(tmp_path: Path, write_run: Write) -> None:
    lines = parts(write_run(lines=3))
    long = json.loads(lines[1]) | {"processes": ["x" * 200_000]}
    path = tmp_path / "long"
    path.write_bytes(lines[0] + json.dumps(long).encode() + b"\n" + lines[2])
    follower = Follower(path)
    follower.back(2)
    assert starts(follower) == [1, 2]


def test_going_back_to_a_time(write_run: Write) -> None:
    path = write_run(lines=400)
    for line in (0, 57, 311, 399):
        follower = Follower(path)
        follower.back_to(START + 10 * (line + 1))
        found = starts(follower)
        assert line in found
        assert found[-1] == 399
        assert len(found) <= 400 - line + 30  # a block more than was asked for at most
        follower.close()


def test_a_line_in_progress_is_read_once_it_is_whole(write_run: Write, tmp_path: Path) -> None:
    first, second = parts(write_run(lines=2))
    path = tmp_path / "slow"
    path.write_bytes(first + second[:100])
    follower = Follower(path)
    assert starts(follower) == []
    with path.open("ab") as file:
        file.write(second[100:])
    assert starts(follower) == [1]
    assert follower.damaged == 0


def test_a_torn_line_that_the_next_writer_cuts_off_does_no_harm(write_run: Write, tmp_path: Path) -> None:
    lines = parts(write_run(lines=3))
    path = tmp_path / "torn"
    path.write_bytes(lines[0] + lines[1][:500])
    follower = Follower(path)
    follower.back(9)
    assert starts(follower) == [0]
    writer = LineWriter(path)
    writer.append(lines[2])
    writer.close()
    assert starts(follower) == [2]
    assert follower.damaged == 0


def test_a_file_that_is_rotated_or_cut_is_followed(write_run: Write, tmp_path: Path) -> None:
    lines = parts(write_run(lines=6))
    path = tmp_path / "log"
    path.write_bytes(lines[0])
    follower = Follower(path)
    with path.open("ab") as file:
        file.write(lines[1])
    path.rename(tmp_path / "log.1")
    with (tmp_path / "log.1").open("ab") as file:
        file.write(lines[2])
    assert starts(follower) == [1, 2]  # the name is free: the old file may still grow
    path.write_bytes(lines[3] + lines[4])
    assert starts(follower) == [3, 4]
    path.write_bytes(lines[5])  # as copytruncate does
    assert starts(follower) == [5]


def test_damaged_lines_are_counted(write_run: Write, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(b"{}\n" + parts(write_run(lines=1))[0] + b"\xff\n")
    follower = Follower(path)
    follower.back(9)
    assert starts(follower) == [0]
    assert follower.damaged == 2


def test_a_pipe_cannot_be_followed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no regular file"):
        Follower(tmp_path)


def run(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "npu_statlogger.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.usefixtures("interruptible")
def test_tail_follows_a_writer(write_run: Write, tmp_path: Path) -> None:
    texts = parts(write_run(lines=5))
    lines = [json.loads(text) for text in texts]
    path = tmp_path / "live"
    writer = LineWriter(path)
    writer.append(*texts[:2])
    tail = run("tail", "-f", "-n", "1", "--json", str(path))
    assert tail.stdout is not None
    assert json.loads(tail.stdout.readline()) == lines[1]
    for text, line in zip(texts[2:], lines[2:], strict=True):
        writer.append(text)
        assert json.loads(tail.stdout.readline()) == line
    tail.send_signal(signal.SIGINT)
    try:
        assert tail.communicate(timeout=60) == ("", "")
    finally:
        tail.kill()
    assert tail.returncode == 130


def test_tail_ends_quietly_when_nobody_reads_on(write_run: Write) -> None:
    tail = run("tail", "-f", "-n", "3", str(write_run(lines=5)))
    assert tail.stdout is not None
    assert tail.stderr is not None
    assert "running" not in tail.stdout.readline()
    tail.stdout.close()
    path = write_run(lines=6)  # the file grows, so that there is something to write
    assert path.exists()
    assert tail.wait(timeout=60) == 141
    assert tail.stderr.read() == ""


def test_tail_shows_a_row_a_line(
    write_run: Write, request_line: Callable, as_text: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(lines=12)
    with path.open("a") as file:
        file.write(as_text([request_line(request_id="abc", cached_tokens=4)]))
    assert main(["tail", str(path), "-n", "4"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["UTC", "engine", "run"]
    assert [row.split()[0] for row in rows] == ["19:41:30", "19:41:40", "19:41:50", "19:42:00"]
    assert all(len(row.split("  ")) > 5 for row in rows)
    assert main(["tail", str(path), "-n", "4", "--kind", "request"]) == 0
    (row,) = capsys.readouterr().out.splitlines()
    assert "request abc length: 10 tokens (4 cached) to 5, queue 10 ms, first 100 ms" in row


def test_tail_goes_back_to_lines_of_the_kind_that_is_asked_for(
    write_run: Write, request_line: Callable, as_text: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(lines=5)
    with path.open("a") as file:
        file.write("damaged\n" + as_text(request_line(arrival=START + at, request_id=f"r{at}") for at in range(2000)))
    assert main(["tail", str(path), "-n", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    assert main(["tail", str(path), "-n", "2", "--kind", "request"]) == 0
    assert [row.split()[2] for row in capsys.readouterr().out.splitlines()] == ["r1998", "r1999"]
    assert main(["tail", str(path), "--kind", "step"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="2"):
        main(["tail", str(path), "-n", "-3"])
    assert "'-3' is no count; write one such as 0 or 10" in capsys.readouterr().err


@given(st.lists(st.sampled_from(["", "x", "y" * 70_000, NOTE]), max_size=12), st.integers(0, 13), st.booleans())
def test_going_back_counts_what_is_wanted(texts: list[str], back: int, notes: bool) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write("".join(text + "\n" for text in texts).encode() + b"torn")
        file.flush()
        follower = Follower(Path(file.name))
        follower.back(back, (lambda line: isinstance(line, Note)) if notes else None)
        there = [text == NOTE for text in texts]
        counted = [index for index, is_note in enumerate(there) if is_note or not notes]
        begin = len(there) if not back else (counted[-back] if len(counted) >= back else 0)
        assert len(list(follower.poll())) == sum(there[begin:])
        assert follower.damaged == len(there[begin:]) - sum(there[begin:])
        follower.close()


@pytest.mark.parametrize("command", ["tail -n 2 --json", "top --once", "doctor"])
def test_a_gzip_file_is_read_as_what_it_holds(
    command: str, write_run: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    name, *options = command.split()
    path, seen = write_run(lines=300), []
    for _ in range(2):
        assert main([name, str(path), *options]) == 0
        seen.append(re.sub(r"last line .* ago|\d\S* \S* ?bytes.*", "", capsys.readouterr().out))
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert seen[0] == seen[1]
    assert len(seen[0].splitlines()) >= 2


def test_a_gzip_file_that_breaks_off_gives_its_whole_lines(write_run: Write) -> None:
    path = write_run(lines=200)
    path.write_bytes(gzip.compress(path.read_bytes())[:-2000])
    follower = Follower(path)
    follower.back(500)
    assert 0 < len(starts(follower)) < 200
    assert follower.damaged == 1
    follower.close()


@pytest.mark.parametrize("command", ["tail", "top --once", "top --svg OUT"])
@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"schema'])
def test_without_a_whole_line_the_code_is_1(
    command: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (name, *options) = tmp_path / "none", command.replace("OUT", str(tmp_path / "out")).split()
    path.write_bytes(content)
    assert main([name, str(path), *options]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"npu-stat: no whole line in {path}.\n")


def test_top_of_a_server_without_traffic_says_that_there_is_no_line_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "idle"
    path.write_text(NOTE + "\n")
    assert main(["top", str(path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "no line yet" in out
    assert "ago" not in out


def test_top_once_shows_latencies_load_and_engines(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main(["top", str(write_run(engines=2, lines=80)), "--once"]) == 0
    text = capsys.readouterr().out
    for word in ("model", "time to first token", "tokens generated", "engine 1", "silent", "prefix cache hits"):
        assert word in text
    assert re.search(r"running +\d+(\.\d)? ", text)


def test_top_draws_into_an_svg_that_needs_nothing_else(write_run: Write, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    out = tmp_path / "top.svg"
    assert main(["top", str(write_run()), "--svg", str(out)]) == 0
    assert "http" not in out.read_text().replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
    assert ET.parse(out).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("interruptible")
def test_top_is_live_in_a_terminal_and_ends_on_control_c(write_run: Write, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    lines = parts(write_run(lines=30))
    path = tmp_path / "live"
    path.write_bytes(b"".join(lines[:20]))
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "npu_statlogger.cli", "top", str(path), "--every", "100ms"]
    top = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"})
    os.close(slave)
    seen = b""
    while seen.count(b"time to first token") < 2:
        seen += os.read(master, 1 << 16)
    with path.open("ab") as file:
        file.write(b"".join(lines[20:]))
    while seen.count(b"time to first token") < 5:
        seen += os.read(master, 1 << 16)
    top.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 60
    while top.poll() is None and time.monotonic() < deadline:
        try:
            os.read(master, 1 << 16)
        except OSError:
            break
    try:
        assert top.wait(timeout=60) == 130
    finally:
        top.kill()
        os.close(master)


def test_top_needs_a_terminal(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main(["top", str(write_run(lines=1))]) == 2
    assert "needs a terminal" in capsys.readouterr().err


def test_top_says_what_to_install(
    write_run: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", str(write_run(lines=1)), "--once"]) == 2
    assert "pip install 'npu-statlogger[top]'" in capsys.readouterr().err


def test_a_window_forgets(make_load: type) -> None:
    window = Window(100.0)
    for snapshot in make_load(engines=2, lines=500).snapshots():
        window.add(snapshot)
    spans = list(window.timeline)
    assert 100 - 2 * window.timeline.width <= sum(span.seconds for span in spans) <= 100 + window.timeline.width
    assert spans[-1].start + spans[-1].seconds == window.last
    assert all(span.rate("generation_tokens") == pytest.approx(2 * 21 * 20 / 10) for span in spans)
