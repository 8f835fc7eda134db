"""Whether Triton is there for vLLM, which asks while it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.vllm_process import run_program

ASKED = """
import torch
import vllm.entrypoints.llm, vllm.v1.engine.core
from vllm.triton_utils import HAS_TRITON
print(HAS_TRITON, torch.npu.is_initialized())
"""


def test_importing_vllm_opens_no_device() -> None:
    """A worker that is forked afterwards chooses its devices: this is a fork of a process that imported it.

    tests/e2e/test_runners.py asks where Triton is there for it.
    """
    done = run_program(ASKED)
    assert done.stdout.split()[-2:] == ["False", "False"], done.stderr[-2000:]


def test_a_process_that_imports_vllm_and_configures_nothing_ends_in_silence() -> None:
    """It has found sources quickly until its end."""
    program = "import inspect, vllm.entrypoints.llm\nprint(inspect.getsourcelines.__module__)"
    environ = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split()[-1] == "npu_platform.sources"
    assert "Exception ignored" not in done.stderr
