"""What one process has compiled, the next one finds: it starts no compiler, and needs none."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from npu_platform.errors import KernelCompilationError
from npu_platform.triton import availability, build, early
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


def test_who_may_read_the_cache_is_as_the_mask_says(folder: Path) -> None:
    """`npu warm` of root fills a cache that another user serves from."""
    mask = os.umask(0)
    os.umask(mask)
    files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".so", ".txt", ".json"}
    assert {oct(path.stat().st_mode & 0o777) for path in files if path.suffix != ".lock"} == {oct(0o666 & ~mask)}


FULL = """
import resource, sys
from pathlib import Path
from npu_platform.triton import build
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
build.write_once(Path(sys.argv[1], "some.so"), bytes(2000))
"""


def test_a_file_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], check=False, capture_output=True, text=True)
    assert "OSError" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_a_compiler_says_is_told_whatever_is_in_the_folder_for_files_of_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failures have a file each, and none meets what another user keeps there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "npu_triton_add.cpp").mkdir()  # the name that they all had
    for _ in range(2):
        with pytest.raises(KernelCompilationError, match=r"kept as (.*/npu_triton_add_.*\.cpp):\n.*no_type") as told:
            build.compile_library("no_type add;", "add", fused=True)
        kept = re.search("kept as (.*):", str(told.value))
        assert kept is not None
        assert Path(kept[1]).read_text() == "no_type add;"
    assert len(list(tmp_path.glob("npu_triton_add_*.cpp"))) == 2


def test_a_second_process_compiles_nothing(folder: Path) -> None:
    assert compilations(folder) == 1
    assert _run(folder, noting_compiler(folder)).returncode == 0
    assert compilations(folder) == 1


SAYING = """
import logging, runpy, sys
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
from npu_platform.triton import build
del sys.argv[0]
runpy.run_path(sys.argv[0])
print(build.what_was_compiled())
"""


def test_a_process_that_compiles_says_so_at_the_first_kernel_and_how_long_it_took(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "saying.py").write_text(SAYING)
    first, second = (_run(tmp_path, {}, str(tmp_path / "kernel.py"), program="saying.py").stdout for _ in range(2))
    cache = re.escape(str(tmp_path / "cache"))
    assert re.search(
        rf"Compiling Triton kernels that are not in {cache} yet, .*`npu warm`.* The first is fill\.", first
    )
    assert re.search(rf"^1 Triton kernels compiled in \d+\.\d s, kept in {cache}$", first, re.MULTILINE)
    assert second.split() == ["None"]


def test_without_a_compiler_what_is_in_the_cache_runs_and_one_sentence_says_what_is_not(folder: Path) -> None:
    none = {"CXX": "no-such-compiler", "PATH": str(folder)}
    assert _run(folder, none).returncode == 0
    assert re.search(
        r"KernelCompilationError: The Triton kernel fill is not in the cache \(.*\), and g\+\+, .*, was not found: "
        r"apt install g\+\+, or name one in CXX, or .* npu warm -- MODEL\.$",
        _run(folder, none, "128").stderr.strip(),
    )


@pytest.mark.nightly
def test_a_variable_by_which_triton_would_keep_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    refused = _run(tmp_path, {"TRITON_STORE_BINARY_ONLY": "1"})
    assert refused.stderr.strip().endswith("and no kernel of npu: unset it.")
    assert _run(tmp_path, {}).returncode == 0, "nothing of it is in the cache"


@pytest.mark.nightly
def test_a_stage_that_is_dumped_can_override_and_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL.replace("assert out.eq(7).all()", "print(out.unique().tolist())"))
    dumps = {"TRITON_DUMP_DIR": str(tmp_path / "dump"), "TRITON_ALWAYS_COMPILE": "1"}
    assert _run(tmp_path, dumps | {"TRITON_KERNEL_DUMP": "1"}).stdout.split() == ["[7.0]"]
    (ttir,) = (tmp_path / "dump").glob("*/fill.ttir")
    assert sorted(path.suffix for path in ttir.parent.iterdir()) == [".cpp", ".so", ".ttir"]
    overriding = {"TRITON_OVERRIDE_DIR": str(tmp_path / "dump"), "TRITON_KERNEL_OVERRIDE": "1"} | dumps
    assert _run(tmp_path, overriding).stderr.strip().endswith("override the stage ttir.")
    for name in ("fill.cpp", "fill.so"):
        (ttir.parent / name).unlink()
    text = ttir.read_text()
    twice, count = re.subn(r"= tt.splat %value\b", "= arith.constant dense<5.0> : tensor<64xf32> //", text)
    assert count == 1, text
    ttir.write_text(twice)
    assert _run(tmp_path, overriding).stdout.split()[-1] == "[5.0]"


def test_an_empty_cache_and_no_compiler_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.missing() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "apt install g++, or name one in CXX" in str(availability.missing())


def _run(
    folder: Path, environ: dict[str, str], *arguments: str, program: str = "kernel.py"
) -> subprocess.CompletedProcess[str]:
    environ = os.environ | environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, folder / program, *arguments]
    return subprocess.run(command, env=environ, check=False, timeout=300, capture_output=True, text=True)


def test_the_hash_of_tritons_library_is_there_before_the_first_launch_asks(tmp_path: Path) -> None:
    """What a process hashed the next one takes from the cache; either is what Triton computes by itself."""
    asked = (
        "import hashlib, sys\n"
        "from npu_platform.triton.early import hash_triton\n"
        "hashed = []\n"
        "sys.addaudithook(lambda event, what: event == 'open' and hashed.append(str(what[0])))\n"
        "thread = hash_triton()\n"
        "thread.join()\n"
        "from triton.runtime import cache\n"
        "assert cache.hashlib is hashlib\n"
        "assert cache.triton_key.cache_info().misses == 1\n"
        "key = cache.triton_key()\n"
        "assert cache.triton_key.cache_info()[:2] == (1, 1)\n"
        "print(sum(name.endswith('libtriton.so') for name in hashed), key)\n"
        "if sys.argv[1:]: assert cache.triton_key.__wrapped__() == key\n"
    )
    environ = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = partial(subprocess.run, env=environ, check=True, timeout=120, capture_output=True, text=True)
    first, second = (run([sys.executable, "-c", asked, *more]).stdout.split() for more in ([], ["compare"]))
    assert (first[0], second[0]) == ("2", "1")  # opened by us and by Triton, then by Triton alone, who reads it
    assert first[1:] == second[1:]
    assert len(list((tmp_path / "npu").glob("libtriton-*.txt"))) == 1


def test_what_the_cache_keeps_of_a_kernel_is_what_every_version_of_triton_reads_back() -> None:
    """Triton 3.5 makes a tuple of the clusters' sizes, which later versions do not have."""
    options = make_backend(GPUTarget("npu", "host", 1)).parse_options({})
    kept = json.loads(json.dumps(vars(options)))
    assert tuple(kept["cluster_dims"]) == (1, 1, 1)


def test_a_library_of_triton_that_changed_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_C").mkdir()
    library = tmp_path / "_C" / "libtriton.so"
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for content in (b"one", b"other"):
        library.write_bytes(content)
        for _ in range(2):
            assert early._hash_of_library() == hashlib.sha256(content).hexdigest()
