"""A cache of compiled kernels for one run of the tests; without Triton or a compiler they are skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """Compile everything anew: what an earlier version generated must not be what is tested."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield os.environ["TRITON_CACHE_DIR"]
    patch.undo()
