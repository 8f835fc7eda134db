"""What the platform's tests share: npu-ops, which NPU_REQUIRE_OPS=1 (set by nox) demands, and quick collections."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from npu_platform import config

IMPORTED = 100_000  # objects, of which a module's own tests make fewer


@pytest.fixture(scope="module", autouse=True)
def imports_out_of_collections() -> None:
    """Keep what is there out of collections: each capture of a graph collects, which took a second beside vLLM."""
    if len(gc.get_objects()) > IMPORTED:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_runner_chosen() -> Iterator[None]:
    """Take back the runner that was chosen for a test's configuration: it is in the environment of this process."""
    yield
    config.begin_choice_of_runner()


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
