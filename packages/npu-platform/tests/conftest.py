"""npu-ops for the tests that need its kernels; NPU_REQUIRE_OPS=1, which nox sets, says that it must be there."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def npu_ops() -> ModuleType:
    """npu-ops with its kernels; where it is not installed the test is skipped, or fails if it should be."""
    if importlib.util.find_spec("npu_ops") is None:
        if os.environ.get("NPU_REQUIRE_OPS") == "1":
            pytest.fail("NPU_REQUIRE_OPS=1, but npu-ops is not installed")
        pytest.skip("npu-ops is not installed")
    import npu_ops

    assert npu_ops.native.available(), "npu-ops is installed without its library"
    return npu_ops
