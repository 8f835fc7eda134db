"""Fixtures of the end-to-end tests: the process must be an npu process, otherwise they would test something else."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
import torch

from npu_platform import activation
from tests.support.network import second_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.network import Network

# Modules that take half a minute and more. A worker takes a module whole, and the last one should not be long.
LONG = (
    "test_batch_invariance",
    "test_disaggregated",
    "test_dtypes",
    "test_faults",
    "test_layouts",
    "test_quantized",
    "test_settings",
    "test_soak",
    "test_speculation",
    "test_speculation_combined",
    "test_tokens",
)

# What judges: its threads would spin for each other beside those of another worker's.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long modules."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(scope="session", autouse=True)
def npu_is_active() -> None:
    """Fail at once, with doctor's sentence, where vLLM would run on another platform."""
    decision = activation.decide()
    if not decision.activate and "NPU_TEST_SERVER_PYTHON" not in os.environ:
        pytest.fail(f"{decision.reason} {decision.remedy or ''}", pytrace=False)


@pytest.fixture
def network() -> Iterator[Network]:
    """Make a network namespace; skips where that takes rights that this user has not."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(second_network())
        except PermissionError as error:
            pytest.skip(str(error))
        yield made
