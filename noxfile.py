"""Every check a developer or CI runs: `uv run nox` for the default ones, `nox -l` for all of them.

uv makes all environments, from uv.lock, so nox itself makes none and any nox will do (`pipx run nox -s e2e`). The whole
workspace lives in .venv, which `uv run` keeps up to date; `packaging` makes environments that hold less.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent))  # any nox may read this file

from tests.support.environments import PACKAGES
from tests.support.nox_environments import (
    NEXT_IMPORTS,
    NEXT_VLLM,
    llama_programs,
    next_python,
    peer_python,
    peer_sample,
    uv,
    vllm_alone,
    wheels_at_hand,
    zen_python,
)

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False
nox.options.sessions = ["lint", "types", "docs", "unit", "integration", "packaging", "e2e", "v1"]
nox.options.sessions += ["next_sample", "report"]

ROOT = Path(__file__).parent
SOURCES = [f"packages/{package}/src" for package in PACKAGES]
# Two at a time, since most of a test is one process that imports vLLM.
WORKERS = ("-n", "2")
ONE_MORE = ("-n", "3")  # where tests wait for other processes
CONFORMANCE_SAMPLE = "0.01"  # of the cases, others for each commit, beside those of the device's own kernels
MARKED = ("unit", "integration", "packaging", "e2e")  # have tests for the night
# What `v1` runs on the other model runner, a sample by day and all of it at night: tests of engines, and of caches that
# the runners hand over.
SAMPLE_ON_V1 = ("tests/e2e/test_tokens.py", "tests/e2e/test_graph_modes.py")
ON_V1 = (
    "tests/e2e",
    "tests/integration/test_kv_models.py",
    "tests/integration/test_kv_offload.py",
)
# Elsewhere neither variable is set: npu takes V2, and V1 for what V2 does not have.
RUNNER_V1: dict[str, str | None] = {"TRITON_DEFAULT_BACKEND": None, "VLLM_USE_V2_MODEL_RUNNER": "0"}
REPORTS = ROOT / ".nox" / "reports"
# All four packages are there, and the device: a test that would do without one of them fails.
EVERYTHING: dict[str, str | None] = {"NPU_REQUIRE_DEVICE": "1", "NPU_REQUIRE_OPS": "1"}
# Threads of OpenMP that spin until the next loop take the core of the other worker: tests took four times as long.
PASSIVE: dict[str, str | None] = {"OMP_WAIT_POLICY": "PASSIVE"}
RAY = "ray==2.60.0"  # not in the environment of all tests: vLLM imports Ray wherever it is installed
ROUTER = "vllm-router==0.1.17"  # a load balancer of the vLLM project, a program of its own
SWEEPS = ("pandas==3.1.1", "seaborn==0.13.2")  # what `vllm bench sweep` makes tables and pictures with
LOADERS = ("tensorizer==2.10.1", "runai-model-streamer==0.15.7")
TOOLS = ROOT / ".nox" / "format-tools"
FORMAT_TOOLS = ("llmcompressor==0.14.0.1", "auto-round==0.15.1", "nvidia-modelopt==0.47.0", "bitsandbytes==0.50.2")
FORMAT_TOOLS += ("torch==2.13.0",)
SUFFIX = "arctic-inference==0.1.1"  # what vLLM asks for; in an environment of its own its build fetches another torch
# The seams of all packages, an engine on each of vLLM's runners; the last two packages have a run of their own,
# as in `unit`.
ON_NEXT = (
    (
        *(f"packages/npu-platform/tests/test_{name}.py" for name in ("compat", "v2_seams", "platform", "features")),
        "packages/npu-ops/tests/test_compat.py",
        "tests/e2e/test_tokens.py::test_model[llama]",
        "tests/e2e/test_runners.py",
    ),
    ("packages/npu-kvconnector/tests/test_connector.py", "packages/npu-statlogger/tests/test_compat.py"),
)
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
def unit(session: nox.Session) -> None:
    """Test the packages beside each other, or some of them (nox -s unit -- npu-ops -k rotary)."""
    chosen = [package for package in PACKAGES if package in session.posargs]
    options = [option for option in session.posargs if option not in chosen]
    # Those that want the device in one run, since each imports torch and vLLM in every worker; the tests of the others
    # set VLLM_TARGET_DEVICE=cpu, for a vLLM that needs none. `packaging` installs each package without the others.
    for group, workers in ((PACKAGES[:2], WORKERS), (PACKAGES[2:], ONE_MORE)):
        folders = [f"packages/{package}/tests" for package in group if package in (chosen or PACKAGES)]
        if folders:
            run_tests(session, *folders, *workers, *options)


@nox.session
def integration(session: nox.Session) -> None:
    """Test the four packages together."""
    # By file, since the tests of a file share one engine's run.
    env = {} if session.posargs else {"NPU_PEER_SAMPLE": peer_sample(session)}
    run_tests(session, "tests/integration", "--dist", "loadfile", *session.posargs, env=env)
    if not session.posargs:
        # Here and not in unit: it is for any npu device, and takes PyTorch's databases, which outweigh the tests.
        sample = ("--part", CONFORMANCE_SAMPLE, "--seed", commit(session))
        run_tests(session, "tests/conformance", *sample, "-q")


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
        env = PASSIVE | {"NPU_ISA": isa, "PYTHONPATH": str(place)}
        chosen_tests = ("-q", "-k", tests, *session.posargs)
        in_workspace(session, "pytest", "packages/npu-ops/tests", *WORKERS, *chosen_tests, env=env)


@nox.session
def arm(session: nox.Session) -> None:
    """Test npu-ops' kernels for 64-bit ARM, cross-compiled, in an emulator (apt: g++-aarch64-linux-gnu, qemu-user)."""
    env = {"NPU_REQUIRE_ARM": "1"}
    in_workspace(session, "pytest", "packages/npu-ops/tests/test_other_processors.py", "-q", *session.posargs, env=env)


@nox.session
def conformance(session: nox.Session) -> None:
    """Test what any npu device must do, against the device that is there."""
    run_tests(session, "tests/conformance", *session.posargs)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build wheels and test what they declare and how they install into clean environments."""
    check_machine(session)
    wheels = ROOT / ".nox" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    build_distributions(session, wheels, "--wheel")
    # By file, since the tests of a file share environments.
    run_tests(session, "tests/packaging", "--dist", "loadfile", "--wheels", str(wheels), *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """Test the engine and `vllm serve` on the npu device, over HTTP, with real models."""
    # By module, which makes its models, engines and servers once; in the order of tests/e2e/conftest.py.
    options = ("--dist", "loadscope", "--no-loadscope-reorder", *session.posargs)
    run_tests(session, "tests/e2e", *options)


@nox.session
def v1(session: nox.Session) -> None:
    """Run a sample of the tests of engines on vLLM's V1 runner (nox -s v1 -- tests/e2e/test_lora.py for others).

    All other sessions leave the choice to npu, which is V2 for nearly all of them (docs/user_guide/v2_runner.md).
    """
    run_tests(session, *(session.posargs or SAMPLE_ON_V1), "--dist", "loadscope", env=RUNNER_V1)


@nox.session
def soak(session: nox.Session) -> None:
    """Load a server with mixed requests for two minutes, or for other seconds (nox -s soak -- 3600)."""
    check_machine(session)
    seconds = session.posargs[0] if session.posargs else "120"
    in_workspace(
        session, "pytest", "tests/e2e/test_soak.py", "-s", env=EVERYTHING | PASSIVE | {"NPU_SOAK_SECONDS": seconds}
    )


@nox.session
def matrix(session: nox.Session) -> None:
    """Run every two features of vLLM together against the eager baseline, and write docs/reference/features.md.

    nox -s matrix -- --resume goes on with a run that was cut off.
    """
    check_machine(session)
    results, options = REPORTS / "matrix", list(session.posargs)
    if "--resume" in options:
        options.remove("--resume")
    else:
        shutil.rmtree(results, ignore_errors=True)
    env = EVERYTHING | PASSIVE | {"NPU_MATRIX_RESULTS": str(results)}
    in_workspace(session, "pytest", "tests/e2e/test_matrix.py", *WORKERS, *options, env=env)
    page = session.run(
        "uv", "run", "--no-sync", "python", "-m", "tests.support.matrix_page", str(results), silent=True, log=False
    )
    (ROOT / "docs" / "reference" / "features.md").write_text(page)


@nox.session
def layouts(session: nox.Session) -> None:
    """Run every kind of model in every layout over several devices, and write docs/reference/layouts.md (-- -k "DP 2").

    What passed before is kept in .nox/reports/layouts and not run again: remove that folder to begin anew.
    """
    check_machine(session)
    results = REPORTS / "layouts"
    env = EVERYTHING | PASSIVE | {"NPU_LAYOUTS_RESULTS": str(results)}
    # The sample is CI's; Ray is not in the environment of all tests.
    tests = ("-k", "not sample", "--deselect", "tests/e2e/test_layouts.py::test_the_page_is_of_these_cases")
    options = ("run", "--locked", "--with", RAY, "pytest", "tests/e2e/test_layouts.py", *tests, *session.posargs)
    uv(session, *options, env=env)
    page = session.run(
        "uv", "run", "--no-sync", "python", "-m", "tests.support.layouts_page", str(results), silent=True, log=False
    )
    (ROOT / "docs" / "reference" / "layouts.md").write_text(page)


@nox.session
def formats(session: nox.Session) -> None:
    """Run every quantised format on every kind of model, and write docs/reference/formats.md (-- -k W4A8).

    What passed before is kept in .nox/reports/formats and not run again: remove that folder to begin anew.
    """
    check_machine(session)
    results = REPORTS / "formats"
    env = EVERYTHING | PASSIVE | {"NPU_FORMATS_RESULTS": str(results)}
    options = ("--deselect", "tests/e2e/test_formats.py::test_the_page_is_of_these_cases", *session.posargs)
    in_workspace(session, "pytest", "tests/e2e/test_formats.py", *options, env=env)
    page = session.run(
        "uv", "run", "--no-sync", "python", "-m", "tests.support.formats_page", str(results), silent=True, log=False
    )
    (ROOT / "docs" / "reference" / "formats.md").write_text(page)


@nox.session
def models(session: nox.Session) -> None:
    """Compare a small model of every architecture of vLLM with transformers and write the table (-- --only Gemma3)."""
    check_machine(session)
    options = session.posargs or ["--page", "docs/user_guide/architectures.md"]
    logs = ("--logs", str(ROOT / ".nox" / "architectures"))
    in_workspace(session, "python", "-m", "tests.architectures", *logs, *options, env=EVERYTHING | PASSIVE)


@nox.session
def examples(session: nox.Session) -> None:
    """Run vLLM's own examples and every sub-command of `vllm bench`, unchanged, on npu."""
    check_machine(session)
    packages = [part for package in SWEEPS for part in ("--with", package)]
    options = ("pytest", "tests/examples", *WORKERS, "--timeout", "600", *session.posargs)
    uv(session, "run", "--locked", *packages, *options, env=EVERYTHING | PASSIVE)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run what the default sessions leave out: tests marked nightly, load, conformance, tiers, the peer, all of V1."""
    for name in MARKED:
        session.notify(name, ["-m", "nightly"])
    session.notify("soak", ["3600"])
    session.notify("v1", ON_V1)
    for name in (
        "conformance",
        "emulated",
        "arm",
        "peer",
        "models",
        "examples",
        "ray",
        "router",
        "suffix",
        "loaders",
        "format_tools",
        "mutants",
        "report",
    ):
        session.notify(name, [])


@nox.session
def report(session: nox.Session) -> None:
    """Print the longest tests and compilations of the sessions before."""
    in_workspace(session, "python", ".ci/report.py", str(REPORTS))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure beside vLLM's CPU backend and llama.cpp, which are made first (nox -s bench -- engine --quick)."""
    check_machine(session)
    suites, options = ["start", "engine", "serve", "kernels"], list(session.posargs)
    alone = ("kvconnector", "triton", "runners", "scale", "ranks", "tiers")  # without a peer
    if options and options[0] in (*suites, *alone, "statlogger", "features", "collectives"):
        suites = [options.pop(0)]
    for suite in suites:
        if suite in alone:
            in_workspace(session, "python", "-m", f"tests.benchmarks.{suite}", *options)
            continue
        if suite == "statlogger":
            statistics_cost(session, *options)
            continue
        others = {} if suite == "start" else {"--peer-python": peer_python(session)}
        if suite in ("engine", "serve"):
            others |= {"--zen-python": zen_python(session)}
        if suite == "engine":
            others |= {"--llama": llama_programs(session)}
        contestants = [part for name, place in others.items() if place for part in (name, place)]
        in_workspace(session, "python", "-m", f"tests.benchmarks.{suite}", *contestants, *options)


@nox.session
def peer(session: nox.Session) -> None:
    """Test the packages that serve any platform on vLLM's CPU backend; its environment is made first."""
    env = {"NPU_PEER_PYTHON": peer_python(session)}
    in_workspace(session, "pytest", "tests/integration", "-m", "peer", *session.posargs, env=env)


@nox.session(name="next")
def next_vllm(session: nox.Session) -> None:
    """Test on the next vLLM and its torch, in an environment of their own (nox -s next -- PATHS, or doctor, demo)."""
    check_machine(session)
    python = next_python(session)
    if session.posargs and session.posargs[0] in ("doctor", "demo"):
        session.run(python, "-m", "npu_platform.cli", *session.posargs, env=PASSIVE)
        return
    # The plugin knows the tests that do not pass there, each with its reason.
    env = EVERYTHING | PASSIVE | {"PYTHONPATH": str(ROOT)}
    pytest = (python, "-m", "pytest", *WORKERS, "-p", "tests.support.next_vllm", "-m", "not nightly")
    sample = ("tests/conformance", "--part", CONFORMANCE_SAMPLE, "--seed", commit(session), "-q")
    by_file = [(f"packages/{package}/tests", "--dist", "loadfile") for package in PACKAGES]
    engines = [("tests/integration", "--dist", "loadfile"), ("tests/e2e", "--dist", "loadscope")]
    for options in [tuple(session.posargs)] if session.posargs else [*by_file, sample, *engines]:
        session.run(*pytest, *options, env=env)


@nox.session
def next_sample(session: nox.Session) -> None:
    """Test the seams and two engines on the next vLLM's Python, laid over .venv: torch and native parts stay."""
    check_machine(session)
    try:
        folder = vllm_alone(session)
    except nox.command.CommandFailed:
        session.skip(f"{NEXT_VLLM} could not be had or built: nothing was tested on it")
    options = (*WORKERS, "--dist", "loadscope", "-p", "tests.support.next_vllm", "-m", "not nightly")
    wanted = [part for name in NEXT_IMPORTS for part in ("--with", name)]
    for tests in [tuple(session.posargs)] if session.posargs else ON_NEXT:
        command = ("run", "--locked", *wanted, "pytest", *options, *tests)
        uv(session, *command, env=EVERYTHING | PASSIVE | {"PYTHONPATH": folder})


@nox.session
def ray(session: nox.Session) -> None:
    """Let Ray start the ranks of an engine on two of its nodes, in an environment with Ray beside the workspace's."""
    options = ("--locked", "--with", RAY, "pytest", "tests/e2e/test_ray.py", "-m", "nightly", *session.posargs)
    uv(session, "run", *options, env=EVERYTHING | PASSIVE)


@nox.session
def router(session: nox.Session) -> None:
    """Kill a server behind vLLM's router under load, in an environment with the router beside the workspace's."""
    options = ("pytest", "tests/e2e/test_router.py", "-m", "nightly", "-s", *session.posargs)
    uv(session, "run", "--locked", "--with", ROUTER, *options, env=EVERYTHING | PASSIVE)


@nox.session
def loaders(session: nox.Session) -> None:
    """Test vLLM's loaders of weights that need packages of their own, beside the workspace's environment."""
    packages = [part for package in LOADERS for part in ("--with", package)]
    options = ("pytest", "tests/e2e/test_loaders.py", "-m", "nightly", *session.posargs)
    uv(session, "run", "--locked", *packages, *options, env=EVERYTHING | PASSIVE)


@nox.session
def format_tools(session: nox.Session) -> None:
    """Test quantised checkpoints made by their formats' own tools, which have an environment of their own."""
    install = ("pip", "install", "--quiet", "--python", str(TOOLS), *wheels_at_hand())
    uv(session, "venv", "--allow-existing", str(TOOLS))
    uv(session, *install, *FORMAT_TOOLS)
    in_workspace(session, "pytest", "tests/e2e/test_format_tools.py", "-m", "nightly", *session.posargs, env=EVERYTHING)


@nox.session
def suffix(session: nox.Session) -> None:
    """Test speculation by suffixes, with arctic-inference built beside the workspace's torch."""
    place = ROOT / ".nox" / "suffix"
    if not (place / "arctic_inference").exists():
        tools = ("--with", "nanobind", "--with", "setuptools", "--with", "pip", "python", "-m", "pip", "install")
        options = ("--quiet", "--no-build-isolation", "--no-deps", "--target", str(place), SUFFIX)
        uv(session, "run", "--locked", *tools, *options)
    env = EVERYTHING | PASSIVE | {"PYTHONPATH": str(place)}
    in_workspace(session, "pytest", "tests/e2e/test_speculation.py", "-k", "suffixes", *session.posargs, env=env)


@nox.session
def vllm_tests(session: nox.Session) -> None:
    """Run vLLM's own tests on npu: nox -s vllm_tests -- FOLDER, with its source distribution, unpacked."""
    if not session.posargs:
        session.error(
            "vllm_tests takes a folder with vLLM's source distribution, unpacked: it has tests and pyproject.toml"
        )
    libraries = (RAY, "pytest-asyncio==1.5.0", "tblib==3.2.2", "multiprocess", "sentence-transformers==6.2.0")
    libraries += ("cohere==7.3.1",)
    tools = [part for library in libraries for part in ("--with", library)]
    where = ("--work", str(ROOT / ".nox" / "vllm-tests"), "--page", "docs/developer_guide/vllm_tests.md")
    run = ("run", "--locked", *tools, "python", "-m", "tests.vllm_tests", *where, *session.posargs)
    uv(session, *run, env=EVERYTHING | PASSIVE)


@nox.session
def mutants(session: nox.Session) -> None:
    """Put seeded faults into a copy of the last commit and see that tests notice each (-- --only WORDS for some)."""
    check_machine(session)
    place = ROOT / ".nox" / "mutants"
    if not place.exists():
        session.run("git", "clone", "--quiet", str(ROOT), str(place))
    session.run("git", "-C", str(place), "fetch", "--quiet", str(ROOT), "HEAD")
    session.run("git", "-C", str(place), "reset", "--hard", "--quiet", "FETCH_HEAD")
    compiling = ("run", "--locked", "--with", "cmake>=3.24", "--with", "ninja")
    # as uv's builds name it: a compiler cache tells compilers apart by their names
    env = EVERYTHING | ({"CXX": "g++"} if shutil.which("g++") and "CXX" not in os.environ else {})
    with session.chdir(place):
        for package in ("npu-platform", "npu-ops"):
            source, python = f"packages/{package}", place / ".venv" / "bin" / "python"
            options = ("-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={python}")
            build = ("-S", source, "-B", f"{source}/build/mutants")
            uv(session, *compiling, "cmake", "-G", "Ninja", *build, *options, env=env)
            uv(session, *compiling, "cmake", "--build", build[-1])
        uv(session, *compiling, "python", "-m", "tests.mutants", ".", *session.posargs, env=env)


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
    """Set the version of all packages and of the pins between them (nox -s bump -- 0.32.0.post1)."""
    if len(session.posargs) != 1:
        session.error("bump takes one version, as in: nox -s bump -- 0.32.0.post1")
    in_workspace(session, "python", ".ci/bump.py", session.posargs[0], group="bump")
    uv(session, "lock")


def statistics_cost(session: nox.Session, *options: str) -> None:
    """Measure npu-statlogger on npu and on vLLM's CPU build.

    That gets the libraries of its sinks and not the package: installed, it would be loaded into every engine there.
    """
    in_workspace(session, "python", "-m", "tests.benchmarks.statlogger", *options)
    python = peer_python(session)
    project = "packages/npu-statlogger/pyproject.toml"
    sinks = [part for name in ("otlp", "parquet", "prometheus", "statsd") for part in ("--extra", name)]
    uv(session, "pip", "install", "--no-config", "--python", python, "-r", project, *sinks)
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "packages" / "npu-statlogger" / "src")))}
    session.run(python, "-m", "tests.benchmarks.statlogger", *(options or ["engine"]), env=path)


def build_distributions(session: nox.Session, folder: Path, *options: str) -> None:
    """Build all packages into a folder."""
    # --no-config: match-runtime is for the workspace; a wheel is built against what its build-system requires.
    uv(session, "build", "--no-config", "--all-packages", "--out-dir", str(folder), *options)


def run_tests(session: nox.Session, *options: str, env: dict[str, str | None] | None = None) -> None:
    """Run tests in the workspace's environment, but for those that are for the night; the first option is a folder."""
    check_machine(session)
    result = REPORTS / f"{options[0].replace('/', '-')}.xml"
    # 5: no test is marked so
    codes = [0, 5] if "nightly" in session.posargs else [0]
    options = ("-m", "not nightly", f"--junitxml={result}", *options)
    in_workspace(session, "pytest", *WORKERS, *options, env=EVERYTHING | PASSIVE | (env or {}), success_codes=codes)


def commit(session: nox.Session) -> str:
    """Return what names this state of the code, which chooses the sample of conformance."""
    found = session.run("git", "rev-parse", "HEAD", silent=True, log=False, success_codes=[0, 128])
    return found.strip() if found and "fatal" not in found else "no commit"


def in_workspace(
    session: nox.Session,
    *command: str,
    group: str | None = None,
    env: dict[str, str | None] | None = None,
    success_codes: Sequence[int] = (0,),
) -> None:
    """Run a command in .venv, brought up to date with the lock first, once in a run of nox."""
    groups = ("--group", group) if group else ()
    sync = ["--no-sync"] if group in up_to_date else ["--locked"]
    uv(session, "run", *sync, *groups, *command, env=env, success_codes=success_codes)
    up_to_date.add(group)


def check_machine(session: nox.Session) -> None:
    """Stop with one sentence where the native parts cannot be built."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        session.error(f"the native parts build on Linux x86_64 only; this is {sys.platform} {platform.machine()}.")
    if not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
        session.error("a C++20 compiler is needed and none was found; on Debian or Ubuntu: apt install g++")
