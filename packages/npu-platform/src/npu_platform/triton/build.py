"""Owns the C++ compiler: which it is, its flags, what libraries depend on, and loading them.

A cache that another process, or another machine, has filled needs none: it says which compiler filled it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from npu_platform import config
from npu_platform.errors import KernelCompilationError

HEADERS = Path(__file__).parent / "runtime"
OWN_FOLDER = "npu"
"""Name of :func:`own_folder`."""
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-w"),
    # A program may read memory as another type; a comparison or division need not signal; loops know no errno.
    *("-fno-strict-aliasing", "-fno-trapping-math", "-fno-math-errno"),
]

_logger = logging.getLogger("vllm.npu_platform.triton")
_seconds: list[float] = []  # that each kernel took which this process has compiled


def compile_library(source: str, name: str, *, fused: bool) -> bytes:
    """Return the library of a kernel's C++; `fused`: a product and a sum may be rounded once.

    Raises KernelCompilationError where there is no compiler or it fails.
    """
    compiler = config.cxx_compiler()
    if compiler is None:
        msg = (
            f"The Triton kernel {name} is not in the cache ({cache_folder()}), and g++, which compiles kernels on "
            "npu, was not found: apt install g++, or name one in CXX, or fill the cache where there is one, for the "
            "same processor: npu warm -- MODEL."
        )
        raise KernelCompilationError(msg)
    if not _seconds:
        _logger.info(
            "Compiling Triton kernels that are not in %s yet, some 0.2 to 0.5 s each, once for this machine; "
            "`npu warm` does it before a server starts. The first is %s.",
            cache_folder(),
            name,
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="npu_triton_") as folder:
        path, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        path.write_text(source)
        contraction = f"-ffp-contract={'fast' if fused else 'off'}"
        command = [compiler, *_FLAGS, *_tuning(), contraction, f"-I{HEADERS}", "-o", str(library), str(path), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode:
            kept = _keep(source, name)
            msg = f"{command[0]} could not compile the Triton kernel {name}{kept}:\n{result.stderr[:4000]}"
            raise KernelCompilationError(msg)
        write_once(_record(), _version(compiler).encode())
        _seconds.append(time.monotonic() - began)
        return library.read_bytes()


def what_was_compiled() -> str | None:
    """Return how many kernels this process has compiled, how long its compiler ran, and where they are kept."""
    if not _seconds:
        return None
    return f"{len(_seconds)} Triton kernels compiled in {sum(_seconds):.1f} s, kept in {cache_folder()}"


def load_library(content: bytes) -> ctypes.CDLL:
    """Load a library from its bytes, which go into a file of Triton's cache, once for all processes.

    A file that another process is writing is never seen: it gets its name when it is complete.
    """
    path = own_folder() / f"{hashlib.sha256(content).hexdigest()}.so"
    write_once(path, content)
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """Return the folder of Triton's cache, with a folder for each kernel."""
    from triton import knobs

    return Path(knobs.cache.dir)


def own_folder() -> Path:
    """Return the folder in it that is the backend's own: libraries as they are loaded, and who compiled them."""
    return cache_folder() / OWN_FOLDER


def is_ready() -> bool:
    """Say whether kernels can run: there is a compiler, or one has filled the cache for this version and processor."""
    return config.cxx_compiler() is not None or os.access(_record(), os.R_OK)


@functools.cache
def toolchain() -> str:
    """Return a hash of what a library depends on beside its source: generator, compiler, flags, processor.

    Where there is no compiler, it is the one that filled the cache: what it made is found.
    """
    compiler, record = config.cxx_compiler(), _record()
    made_by = _version(compiler) if compiler is not None else record.read_text() if os.access(record, os.R_OK) else ""
    return hashlib.sha256(f"{_surroundings()}\n{made_by}".encode()).hexdigest()[:16]


def _record() -> Path:
    """Return the file that says which compiler has filled the cache for this version and processor."""
    return own_folder() / f"compiler-{_surroundings()}.txt"


def write_once(path: Path, content: bytes) -> None:
    """Write a file of the cache unless this user can read one there; nobody sees a part of it.

    Who may read it is as the user's mask says, as of Triton's own files there: another user may serve from the cache.
    """
    if os.access(path, os.R_OK):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _keep(source: str, name: str) -> str:
    """Keep the source of a kernel that was not compiled; returns the words that say where, none if nowhere."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"npu_triton_{name}_", suffix=".cpp", delete=False) as kept:
            kept.write(source)
    except OSError:  # the compiler's words matter more
        return ""
    return f", kept as {kept.name}"


@functools.cache
def _tuning() -> tuple[str, ...]:
    """Return the flag that keeps the compiler from gathers, where their masks are vectors of numbers.

    g++ 12 writes a mask that lets everything through as ones, of which a gather of AVX2 reads the sign: nothing is
    loaded, and zeros are stored (``tests/triton/test_masks.py`` has such a kernel). Masks of AVX-512 are no numbers.
    """
    has_masks = "avx512f" in _processor().split()
    return ("-mtune=generic",) if platform.machine() in ("x86_64", "AMD64") and not has_masks else ()


@functools.cache
def _version(compiler: str) -> str:
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return asked.stdout.partition("\n")[0]


@functools.cache
def _surroundings() -> str:
    """Return a hash of what a library depends on beside source and compiler: generator, headers, flags, processor."""
    digest = hashlib.sha256("\n".join((*_FLAGS, _processor())).encode())
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.suffix in (".py", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return the instructions of the processor, which -march=native reads as well."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or os.uname().machine
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
