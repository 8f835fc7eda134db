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
    """Compile a driver with a C compiler and macros; returns the library's path."""

    def run(*macros: str, name: str = "smallest") -> Path:
        library = tmp_path_factory.mktemp("driver") / f"lib{name}.so"
        source = PACKAGE / f"tests/native/{name}_driver.c"
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


def test_the_headers_of_drivers_and_kernels_are_installed() -> None:
    installed, sources = Path(_C.__file__).with_name("include"), PACKAGE / "csrc/include"
    for name in ("npu_driver.h", "npu_launch.h"):
        assert (installed / name).read_text() == (sources / name).read_text()


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
    sleepless = (
        "import torch\npool = torch.npu.MemPool()\nprint(torch.npu.can_suspend_pools(), torch.npu.is_initialized())\n"
        "try: torch.npu.suspend_pool(pool)\nexcept RuntimeError as error: print(error)"
    )
    for macros in ((), ("-DOLD_TABLE",)):  # a table without functions at its end, and one that ends before them
        done = run_python(sleepless, NPU_DEVICE=str(compile_driver(*macros)))
        assert done.stdout.startswith("False False\nnpu: the driver 'smallest' cannot take memory back"), done.stderr
    wrong = run_python(program, NPU_DEVICE=f"{driver}:slow")
    assert "the one option is 'fast'" in wrong.stdout


ANSWERS = """
import torch
for work in (lambda: torch.ones(1, device="npu"), lambda: torch.ones(1).pin_memory(), lambda: torch.npu.Event().record()):
    try: work()
    except RuntimeError as error: print(error)
"""


@pytest.mark.parametrize(
    ("macro", "options", "said"),
    [
        ("-DSILENT", ":slow", ["returned status 1 without a sentence"] * 3),
        ("-DODD_RANGE", "", ["must answer memory_range() with a base on a granule"]),
        ("-DODD_MAP", "", ["must answer memory_map() with whole granules (2 MiB) of memory_range()"]),
        ("-DNOTHING", "", ["must answer host_allocate() with memory", "must answer event_create() with an event"]),
    ],
)
def test_an_answer_that_breaks_the_rules_is_an_error(
    compile_driver, run_python: RunPython, macro: str, options: str, said: list[str]
) -> None:
    done = run_python(ANSWERS, NPU_DEVICE=f"{compile_driver(macro)}{options}")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert len(lines) == len(said), lines
    assert all(part in line and "the npu driver 'smallest'" in line for part, line in zip(said, lines, strict=True)), (
        lines
    )


def test_ordinals_and_remedies_of_a_vendors_device(compile_driver, run_python: RunPython) -> None:
    program = """
import torch
for work in (lambda: torch.npu.mem_get_info(5), lambda: torch.empty(65 << 20, dtype=torch.uint8, device="npu")):
    try: print(work())
    except RuntimeError as error: print(error)
"""
    done = run_python(program, NPU_DEVICE=str(compile_driver()))
    ordinal, memory = done.stdout.splitlines()
    assert "invalid device ordinal 5: 1 visible" in ordinal
    assert memory.startswith("NPU out of memory")
    assert "NPU_SIMULATOR" not in done.stdout


def test_a_driver_says_why_it_has_no_memory(compile_driver, run_python: RunPython) -> None:
    """As where what is free does not lie together, which the device's totals do not show."""
    program = """
import torch
parts = [torch.empty(16 << 20, dtype=torch.uint8, device="npu") for _ in range(3)]
del parts[1]
try: torch.empty(24 << 20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error: print(error)
torch.empty(16 << 20, dtype=torch.uint8, device="npu")
"""
    done = run_python(program, NPU_DEVICE=str(compile_driver()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("The driver: smallest: used up\n")


def test_a_launch_that_the_driver_loses_is_an_error(compile_driver, run_python: RunPython) -> None:
    program = """
import torch
x = torch.ones(3, device="npu")
for op in (torch.sinh, lambda tensor: tensor.sinh_()):
    try: print(op(x).cpu())
    except RuntimeError as error: print(error)
print(x.tolist())
"""
    done = run_python(program, NPU_DEVICE=str(compile_driver("-DFORGETFUL")))
    lost = "the npu driver 'smallest' reports the launch of aten::sinh"
    first, second, value = done.stdout.splitlines()
    assert first.startswith(lost), (done.stdout, done.stderr)
    assert second.startswith(lost)
    assert value == "[1.0, 1.0, 1.0]"


def test_a_device_is_opened_when_it_is_used(compile_driver, run_python: RunPython) -> None:
    program = """
import torch
print(torch.npu.device_count(), torch.ones(3, device="npu:0").sum().item())
torch.npu.empty_cache()
try: torch.ones(3, device="npu:1")
except RuntimeError as error: print(error)
"""
    done = run_python(program, NPU_DEVICE=str(compile_driver("-DEXCLUSIVE")))
    assert done.stdout.splitlines() == ["2 3.0", "smallest: another process holds it"], done.stderr


LATE = """
import torch

def pinned(value): return torch.full((1024,), value, pin_memory=True)
def holds(tensor, value): return bool(tensor.eq(value).all())

"""
LATE_WORK = {
    "pinned memory that is copied to the device": """
source = pinned(1.0)
place = source.data_ptr()
x = source.to("npu", non_blocking=True)
del source
other = pinned(2.0)
print(holds(x.cpu(), 1), other.data_ptr() != place, pinned(3.0).data_ptr() == place)
""",
    "pinned memory that is copied from the device": """
x, target = torch.full((1024,), 5.0, device="npu"), pinned(0.0)
target[16:].copy_(x[16:], non_blocking=True)
del target
other = pinned(7.0)
torch.npu.synchronize()
print(holds(other, 7))
""",
    "device memory that another stream reads": """
x, target, side = torch.ones(1024, device="npu"), pinned(0.0), torch.npu.Stream()
before, place = torch.npu.memory_allocated(), x.data_ptr()
with torch.npu.stream(side):
    target.copy_(x, non_blocking=True)
x.record_stream(side)
del x
other = torch.full((1024,), 9.0, device="npu")
side.synchronize()
print(holds(target, 1), torch.ones(1024, device="npu").data_ptr() == place)
del other
print(torch.npu.memory_allocated() == before - 4096)
""",
    "device memory that another stream reads, and there is no other": """
x, target, side = torch.ones(10 << 20, device="npu"), pinned(0.0), torch.npu.Stream()
with torch.npu.stream(side):
    target.copy_(x[:1024], non_blocking=True)
x.record_stream(side)
del x
other = torch.full((10 << 20,), 9.0, device="npu")
print(holds(target, 1))
""",
    "a copy to another device": """
x = torch.zeros(1024, device="npu:0")
x.copy_(pinned(1.0), non_blocking=True)
print(holds(x.to("npu:1").cpu(), 1))
x.copy_(pinned(2.0), non_blocking=True)
print(holds(x.double().to("npu:1", torch.float32).cpu(), 2))
y = torch.zeros(1024, device="npu:1")
y.copy_(x, non_blocking=True)
x.zero_()
print(holds(y.cpu(), 2))
""",
}


@pytest.mark.parametrize("work", LATE_WORK)
def test_memory_is_not_used_again_before_late_work_is_done(compile_driver, run_python: RunPython, work: str) -> None:
    done = run_python(LATE + LATE_WORK[work], NPU_DEVICE=str(compile_driver(name="late")))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"True"}, done.stdout


FORK = """
import os, signal, threading, time
import torch

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits for ever
        try: work()
        except RuntimeError as error: print(error, flush=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_fork_while_another_thread_pins_memory(compile_driver, run_python: RunPython) -> None:
    program = """
torch.ones(2).pin_memory()
thread = threading.Thread(target=lambda: torch.empty(4 << 20, dtype=torch.int8, pin_memory=True))
thread.start()
time.sleep(0.3)
print(in_child(lambda: print(torch.ones(2).pin_memory().is_pinned(), flush=True)))
thread.join()
"""
    done = run_python(FORK + program, NPU_DEVICE=str(compile_driver("-DSLOW")))
    assert done.stdout.splitlines() == ["True", "0"], done.stderr


def test_a_fork_while_another_thread_brings_up_the_device(compile_driver, run_python: RunPython) -> None:
    program = """
thread = threading.Thread(target=lambda: torch.ones(2, device="npu"))
thread.start()
time.sleep(0.3)
print(in_child(lambda: torch.ones(2, device="npu")))
thread.join()
print(in_child(lambda: print(torch.ones(2, device="npu").sum().item(), flush=True)))
"""
    done = run_python(FORK + program, NPU_DEVICE=str(compile_driver("-DSLOW")))
    cut, code, later, later_code = done.stdout.splitlines()
    assert "was forked while another thread brought up the device" in cut, (done.stdout, done.stderr)
    assert (code, later, later_code) == ("0", "2.0", "0")


MANY_PROCESSORS = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <string.h>

/* As Linux where there may be 4096 processors: of them 1096 are this process's. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t* mask) {
  (void)pid;
  if (size < 512) {
    errno = EINVAL;
    return -1;
  }
  memset(mask, 0, size);
  memset(mask, 0xff, 1096 / 8);
  return 0;
}
"""


def test_more_processors_than_a_cpu_set_holds(tmp_path, run_fresh_python):
    source, library = tmp_path / "affinity.c", tmp_path / "libaffinity.so"
    source.write_text(MANY_PROCESSORS)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    finished = run_fresh_python("import torch; print(torch.npu.get_num_threads())", LD_PRELOAD=str(library))
    assert finished.stdout.strip() == "1096", finished.stderr
