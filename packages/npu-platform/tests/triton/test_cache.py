"""What one process has compiled, the next one finds: it starts no compiler, and needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_platform.triton import availability
from tests.support.compilers import compilations, noting_compiler

KERNEL = """
import sys, torch, triton
import triton.language as tl

@triton.jit
def fill(out, value, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, value, mask=i < n)

out = torch.zeros(100, device="npu")
fill[(2,)](out, 7.0, 100, BLOCK=int(sys.argv[1]) if sys.argv[1:] else 64)
assert out.eq(7).all()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program, a cache that a first process has filled, and a compiler that notes."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernel.py").write_text(KERNEL)
    assert _run(folder, noting_compiler(folder)).returncode == 0
    return folder


def test_a_second_process_compiles_nothing(folder: Path) -> None:
    assert compilations(folder) == 1
    assert _run(folder, noting_compiler(folder)).returncode == 0
    assert compilations(folder) == 1


def test_without_a_compiler_what_is_in_the_cache_runs_and_one_sentence_says_what_is_not(folder: Path) -> None:
    none = {"CXX": "no-such-compiler", "PATH": str(folder)}
    assert _run(folder, none).returncode == 0
    assert re.search(
        r"KernelCompilationError: The Triton kernel fill is not in the cache \(.*\), and g\+\+, .*, was not found: "
        r"apt install g\+\+, or name one in CXX, or .* npu warm -- MODEL\.$",
        _run(folder, none, "128").stderr.strip(),
    )


def test_an_empty_cache_and_no_compiler_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.missing() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "apt install g++, or name one in CXX" in str(availability.missing())


def _run(folder: Path, environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, folder / "kernel.py", *arguments]
    return subprocess.run(command, env=environ, check=False, timeout=300, capture_output=True, text=True)


def test_the_hash_of_tritons_library_is_there_before_the_first_launch_asks() -> None:
    asked = (
        "from npu_platform.triton.early import hash_triton\n"
        "thread = hash_triton()\n"
        "thread.join()\n"
        "from triton.runtime.cache import triton_key\n"
        "assert triton_key.cache_info().misses == 1\n"
        "triton_key()\n"
        "assert triton_key.cache_info()[:2] == (1, 1)\n"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=120)
