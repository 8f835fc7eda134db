"""The command npu: what all its sub-commands share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Unbuffered, argparse swallows what goes wrong when it prints.
SETTINGS = ("NPU_", "VLLM_", "PYTHONUNBUFFERED")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}


@pytest.mark.parametrize(
    "arguments", [["info"], pytest.param(["doctor", "--json"], marks=pytest.mark.nightly), ["--help"]]
)
def test_a_reader_that_has_gone_ends_it_in_silence(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "npu_platform.cli", *arguments]
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=CLEAN, timeout=300, check=False
    )
    os.close(write_end)
    assert done.returncode == 141
    assert "BrokenPipe" not in done.stderr
    assert "Traceback" not in done.stderr
