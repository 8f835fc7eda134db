"""Fixtures of the device's tests: other Python processes, and a clean allocator."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.forks import ForkServer

RunPython = Callable[..., subprocess.CompletedProcess[str]]
INHERITED = {name: value for name, value in os.environ.items() if not name.startswith("NPU_")}


@pytest.fixture
def run_fresh_python() -> RunPython:
    """Run a program in a fresh process with extra environment variables; returns the finished process."""

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=INHERITED | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Do as run_fresh_python, without the 3 seconds: the environment is there before the first use, after the import."""
    server = ForkServer("torch", environ=INHERITED, name="device")

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return server.run(program, environ=INHERITED | environment)

    return run


@pytest.fixture
def clean_memory() -> Iterator[None]:
    """Start from an allocator without garbage and without old peaks."""
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    yield
    gc.collect()
