"""Fixtures of the end-to-end tests: the process must be an npu process, otherwise they would test something else."""

from __future__ import annotations

import os

import pytest
import torch

from npu_platform import activation

# What judges: its threads would spin for each other beside those of another worker's.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def npu_is_active() -> None:
    """Fail at once, with doctor's sentence, where vLLM would run on another platform."""
    decision = activation.decide()
    if not decision.activate and "NPU_TEST_SERVER_PYTHON" not in os.environ:
        pytest.fail(f"{decision.reason} {decision.remedy or ''}", pytrace=False)
