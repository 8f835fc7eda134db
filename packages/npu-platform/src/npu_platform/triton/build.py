"""Owns the C++ compiler: which it is, its flags, what libraries depend on, and loading them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from npu_platform import config
from npu_platform.errors import KernelCompilationError

HEADERS = Path(__file__).parent / "runtime"
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-w"),
    # A program may read memory as another type; a comparison or division need not signal; loops know no errno.
    *("-fno-strict-aliasing", "-fno-trapping-math", "-fno-math-errno"),
]


def compile_library(source: str, name: str, *, fused: bool) -> bytes:
    """Return the library of a kernel's C++; `fused`: a product and a sum may be rounded once.

    Raises KernelCompilationError where there is no compiler or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="npu_triton_") as folder:
        path, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        path.write_text(source)
        contraction = f"-ffp-contract={'fast' if fused else 'off'}"
        command = [_compiler(), *_FLAGS, contraction, f"-I{HEADERS}", "-o", str(library), str(path), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode:
            kept = Path(tempfile.gettempdir()) / f"npu_triton_{name}.cpp"
            kept.write_text(source)
            msg = f"{command[0]} could not compile the Triton kernel {name}, kept as {kept}:\n{result.stderr[:4000]}"
            raise KernelCompilationError(msg)
        return library.read_bytes()


def load_library(content: bytes) -> ctypes.CDLL:
    """Load a library from its bytes, which go into a file of Triton's cache, once for all processes.

    A file that another process is writing is never seen: it gets its name when it is complete.
    """
    from triton import knobs

    folder = Path(knobs.cache.dir) / "npu"
    path = folder / f"{hashlib.sha256(content).hexdigest()}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    return ctypes.CDLL(str(path))


@functools.cache
def toolchain() -> str:
    """Return a hash of what a library depends on beside its source: compiler, flags, processor."""
    compiler = config.cxx_compiler()
    version = ""
    if compiler is not None:
        asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
        version = asked.stdout.partition("\n")[0]
    parts = (str(compiler), version, *_FLAGS, _processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compiler() -> str:
    compiler = config.cxx_compiler()
    if compiler is None:
        msg = "Triton kernels on npu are compiled by g++, which was not found: apt install g++, or name one in CXX."
        raise KernelCompilationError(msg)
    return compiler


def _processor() -> str:
    """Return the instructions of the processor, which -march=native reads as well."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or os.uname().machine
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
