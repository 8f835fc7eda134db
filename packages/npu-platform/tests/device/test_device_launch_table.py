"""Libraries of kernels reach the device through npu_launch.h: what they may throw, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import RunPython

PACKAGE = Path(__file__).parents[2]

PRELUDE = """
import ctypes, torch
library = ctypes.CDLL({library!r})
library.error_of.restype = ctypes.c_char_p
table = ctypes.c_void_p(torch.ops.npu.launch_table())
visits, threads = ctypes.c_int64(), ctypes.c_int64()
def visit_all(device, n, throws_at=-1):
    arguments = (ctypes.c_int64(n), ctypes.c_int64(throws_at), ctypes.byref(visits), ctypes.byref(threads))
    return library.visit_all(table, device, *arguments)
torch.ones(1, device="npu")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile loops.cpp as anybody would; returns the library's path."""
    path = tmp_path_factory.mktemp("kernels") / "libloops.so"
    source, include = PACKAGE / "tests/native/loops.cpp", PACKAGE / "csrc/include"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, f"-I{include}", str(source), "-o", str(path)], check=True)
    return str(path)


def test_an_exception_of_a_loop_is_an_error_of_the_launch_and_the_cores_go_on(
    library: str, run_python: RunPython
) -> None:
    program = """
for bad in (0, 31, 63):
    assert visit_all(0, 64, bad) != 0
    assert library.error_of(table) == b"index %d" % bad, library.error_of(table)
    assert visits.value < 64
most = 0
for _ in range(50):
    assert visit_all(0, 64) == 0 and visits.value == 64
    most = max(most, threads.value)
assert most > 1, "the cores work no more"
print("all well")
"""
    done = run_python(PRELUDE.format(library=library) + program, NPU_NUM_THREADS="3")
    assert done.stdout == "all well\n", done.stderr


def test_an_ordinal_that_no_device_has_is_refused(library: str, run_python: RunPython) -> None:
    program = """
for device in (-1, 1, 128, 256):
    assert visit_all(device, 4) != 0 and visits.value == 0
    assert b"invalid device ordinal %d" % device in library.error_of(table), library.error_of(table)
print("all well")
"""
    done = run_python(PRELUDE.format(library=library) + program)
    assert done.stdout == "all well\n", done.stderr
