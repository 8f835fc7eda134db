"""Owns the kernels' plainest bodies as other processors compile them, without torch: 64-bit ARM in an emulator, and none that we know.

`nox -s arm` runs this; it needs Debian's packages g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
SOURCES = [
    *sorted(PACKAGE.glob("csrc/kernels/*/scalar.cpp")),
    *sorted(PACKAGE.glob("csrc/dispatch/*.cpp")),
    Path(__file__).with_name("native") / "kernels_test.cpp",
]
# As in csrc/CMakeLists.txt. Vectors cross no library border.
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-pthread"]


def needed(program: str) -> str:
    """Return where it is; skips without, but for `nox -s arm`, which is there for nothing else."""
    path = shutil.which(program)
    if path is None:
        said = f"{program} is not there: apt-get install g++-aarch64-linux-gnu qemu-user"
        if os.environ.get("NPU_REQUIRE_ARM") == "1":
            pytest.fail(said)
        pytest.skip(said)
    return path


def compiled(folder: Path, compiler: str, *flags: str) -> str:
    """Return the path of the test's program."""

    def compile_one(source: Path) -> str:
        built = str(folder / f"{source.parent.name}-{source.stem}.o")
        subprocess.run([compiler, *FLAGS, *flags, f"-I{PACKAGE / 'csrc'}", "-c", str(source), "-o", built], check=True)
        return built

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        objects = list(threads.map(compile_one, SOURCES))
    program = str(folder / "kernels_test")
    subprocess.run([compiler, *objects, "-pthread", "-static", "-o", program], check=True)
    return program


@pytest.mark.nightly
def test_arm_in_an_emulator(tmp_path):
    emulator, compiler = needed("qemu-aarch64"), needed("aarch64-linux-gnu-g++")
    program = compiled(tmp_path, compiler, "-DNPU_AARCH64_TIERS", "-DNPU_TIER=neon")
    done = subprocess.run([emulator, program], capture_output=True, text=True, check=False)
    assert done.stdout == "neon all well\n", done.stderr


@pytest.mark.nightly
def test_a_processor_that_we_do_not_know(tmp_path):
    program = compiled(tmp_path, needed("c++"), "-DNPU_TIER=scalar")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout == "scalar all well\n", done.stderr
