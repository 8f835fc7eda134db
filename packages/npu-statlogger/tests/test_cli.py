"""The command npu-stat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from npu_statlogger.cli import main
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from vllm.v1.metrics.stats import IterationStats


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
    assert merged["counters"]["tokens.generation"] == 9
    assert merged["distributions"]["inter_token_seconds"]["count"] == 6
    assert merged["end"] >= merged["start"]


def test_the_text_shows_percentiles_and_reasons(
    path: Path, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, iteration_stats, "a")
    assert main(["summary", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1 lines, 1 processes" in text
    assert "p99.9" in text
    assert "finished.length" in text
    assert "e2e_seconds" in text


def test_a_damaged_line_is_named_and_left_out(
    path: Path, iteration_stats: IterationStats, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("{}\n")
    write(path, iteration_stats, "a")
    assert main(["summary", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert f"{path}:1: left out" in output.err
    assert json.loads(output.out)["counters"]["tokens.generation"] == 3


def test_no_line_is_exit_code_1_and_no_file_is_2(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text('{"schema')
    assert main(["summary", str(path)]) == 1
    assert "no whole line" in capsys.readouterr().err
