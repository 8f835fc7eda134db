"""Whether Triton is there for vLLM, which asks while it is imported."""

from __future__ import annotations

import pytest

from tests.support.vllm_process import run_program

ASKED = """
import torch
import vllm.entrypoints.llm, vllm.v1.engine.core
from vllm.triton_utils import HAS_TRITON
print(HAS_TRITON, torch.npu.is_initialized())
"""


@pytest.mark.parametrize(("environ", "has_triton"), [({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True), ({}, False)])
def test_importing_vllm_opens_no_device(environ: dict[str, str], has_triton: bool) -> None:
    """A worker that is forked afterwards chooses its devices: this is a fork of a process that imported it."""
    done = run_program(ASKED, **environ)
    assert done.stdout.split()[-2:] == [str(has_triton), "False"], done.stderr[-2000:]
