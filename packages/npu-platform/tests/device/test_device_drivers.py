"""NPU_DEVICE loads a driver that was written against npu_driver.h alone, and says why it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npu_platform import _C

if TYPE_CHECKING:
    from .conftest import RunPython

PACKAGE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compile_driver(tmp_path_factory):
    """Compile smallest_driver.c with a C compiler and macros; returns the library's path."""

    def run(*macros: str) -> Path:
        library = tmp_path_factory.mktemp("driver") / "libsmallest.so"
        source = PACKAGE / "tests/native/smallest_driver.c"
        header = Path(_C.__file__).with_name("include")  # as it is installed
        flags = ["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *macros]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *flags, f"-I{header}", str(source), "-o", str(library)], check=True)
        return library

    return run


PROGRAM = """
import torch
assert torch.npu.get_device_name() == "Smallest NPU" and not torch.npu.is_initialized()
properties = torch.npu.get_device_properties()
assert (properties.driver, properties.major, properties.minor) == ("smallest", 3, 1) and properties.computes
assert properties.total_memory == 64 << 20 and properties.multi_processor_count == 1

x, w = torch.randn(64, 64), torch.randn(64, 64)
a, b = x.to("npu"), w.to("npu")
torch.testing.assert_close((a @ b).relu().cpu(), (x @ w).relu())
torch.testing.assert_close(torch.nn.functional.linear(a, b).t().double().cpu(), torch.nn.functional.linear(x, w).t().double())
assert torch.arange(5, device="npu").sum().item() == 10 and torch.ones(3).pin_memory().is_pinned()

graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    c = a + 1
a.zero_()
graph.replay()
assert c.cpu().eq(1).all()

start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
stream = torch.npu.Stream()
with torch.npu.stream(stream):
    start.record()
    a.add_(1), a.mul_(2)
    end.record()
assert stream.npu_stream == 7 and end.query() and start.elapsed_time(end) == 2

try:
    a.tan()
    raise SystemExit("the driver's refusal was lost")
except torch.AcceleratorError as error:
    assert "no tangent" in str(error)
try:
    torch.empty(65 << 20, dtype=torch.uint8, device="npu")
    raise SystemExit("more memory than there is")
except torch.OutOfMemoryError:
    pass
assert a.add_(1).cpu().eq(3).all()
print("all well")
"""


def test_library_written_against_the_header_alone(compile_driver, run_python: RunPython) -> None:
    done = run_python(PROGRAM, NPU_DEVICE=f"{compile_driver()}:fast")
    assert done.stdout == "all well\n", done.stderr


def test_libraries_that_are_refused(compile_driver, run_python: RunPython, tmp_path: Path) -> None:
    program = "import torch\ntry: torch.ones(1, device='npu')\nexcept RuntimeError as error: print(error)"
    for library, reason in {
        compile_driver("-DWRONG_ABI"): "does not implement ABI 1",
        compile_driver("-DWITHOUT_COPY", "-Wno-unused-function"): "'smallest' has no function copy",
        tmp_path / "nothing.so": "cannot be loaded",
        Path(_C.__file__): "exports no npu_driver_entry",
    }.items():
        done = run_python(program, NPU_DEVICE=str(library))
        assert reason in done.stdout, (library, done.stdout, done.stderr)


def test_what_a_driver_cannot_do_is_refused(compile_driver, run_python: RunPython) -> None:
    program = "import torch\ntry: torch.ones(1, device='npu')\nexcept RuntimeError as error: print(error)"
    driver = str(compile_driver())
    checked = run_python(program, NPU_DEVICE=driver, NPU_DEBUG="memory")
    assert "NPU_DEBUG=memory cannot be used: the npu driver 'smallest'" in checked.stdout
    wrong = run_python(program, NPU_DEVICE=f"{driver}:slow")
    assert "the one option is 'fast'" in wrong.stdout
