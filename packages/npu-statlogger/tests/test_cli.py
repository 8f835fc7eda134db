"""The command npu-stat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from npu_statlogger.cli import main
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


def write(path: Path, stats: IterationStats, model: str) -> None:
    recorder = Recorder(StatLoggerConfig(path), model)
    recorder.put(None, stats, None)
    recorder.close()


def test_a_summary_merges_all_lines_of_all_files(
    tmp_path: Path, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path, model in ((one, "a"), (one, "a"), (two, "b")):
        write(path, iteration_stats, model)
    assert main(["summary", str(one), str(two), "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)
    assert merged["models"] == ["a", "b"]
    assert merged["counters"]["generation_tokens"] == 9
    assert merged["distributions"]["inter_token_latency_seconds"]["count"] == 6
    assert merged["end"] >= merged["start"]
    assert merged["by_engine"].keys() == {"0"}


def test_engines_are_shown_apart_and_together(
    path: Path, scheduler_stats: SchedulerStats, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "a", engines=[0, 1, 2])
    recorder.put(scheduler_stats, iteration_stats, None, engine=0)
    recorder.put(scheduler_stats, None, None, engine=2)
    recorder.close()
    assert main(["summary", str(path), "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)
    assert merged["engines"] == [0, 1, 2]
    assert merged["counters"]["scheduler_steps"] == 2
    steps = {engine: line["counters"].get("scheduler_steps", 0) for engine, line in merged["by_engine"].items()}
    assert steps == {"0": 1, "1": 0, "2": 1}
    assert main(["summary", str(path)]) == 0
    table = [row.split() for row in capsys.readouterr().out.splitlines()[-5:]]
    assert [row[:3] for row in table[1:]] == [["0", "3", "6"], ["1", "0", "0"], ["2", "3", "6"], ["sum", "6", "12"]]


def test_a_reader_that_has_gone_ends_it_in_silence(path: Path, iteration_stats: IterationStats) -> None:
    write(path, iteration_stats, "a")
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "npu_statlogger.cli", "summary", str(path)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_text_shows_percentiles_and_reasons(
    path: Path, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, iteration_stats, "a")
    assert main(["summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1 lines, 1 processes" in text
    assert "p99.9" in text
    assert "request_success.length" in text
    assert "e2e_request_latency_seconds" in text


def test_a_damaged_line_is_named_and_left_out(
    path: Path, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, iteration_stats, "a")
    with path.open("a") as file:
        file.write("{}\n")
    assert main(["summary", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert f"{path}:3: left out" in output.err
    assert json.loads(output.out)["counters"]["generation_tokens"] == 3


def test_no_line_is_exit_code_1_and_no_file_is_2(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text('{"schema')
    assert main(["summary", str(path)]) == 1
    assert "no whole line" in capsys.readouterr().err
