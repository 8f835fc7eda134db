"""What holds for every command: a reader that goes, a full disk, and help that says what each is for."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., Path]

COMMANDS = {
    "summary": [],
    "top": ["--once"],
    "tail": [],
    "report": [],
    "merge": [],
    "slo": ["--ttft", "1s"],
    "doctor": [],
}


def run(command: str, path: Path, output: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "npu_statlogger.cli", command, str(path), *COMMANDS[command]]
    return subprocess.run(arguments, stdout=output, stderr=subprocess.PIPE, text=True, timeout=300, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_gone_ends_it_in_silence(command: str, write_run: Write) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run(command, write_run(), write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_behind_the_output_is_named(command: str, write_run: Write) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 # a device
        done = run(command, write_run(), full.fileno())
    assert done.returncode == 2
    assert done.stderr.endswith("npu-stat: cannot write the output: No space left on device.\n")


def test_help_says_what_each_command_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in [*COMMANDS, "diff", "replay", "dashboard"])
