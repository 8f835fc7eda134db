"""Whether Triton is there for vLLM, which asks while it is imported, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from npu_platform.triton import availability
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

ASKED = """
import torch
import vllm.entrypoints.llm, vllm.v1.engine.core
from vllm.triton_utils import HAS_TRITON
print(HAS_TRITON, torch.npu.is_initialized())
"""


@pytest.mark.parametrize(
    ("variables", "has_triton"),
    [({}, "True"), pytest.param({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "False", marks=pytest.mark.nightly)],
    ids=["V2", "V1"],
)
def test_importing_vllm_opens_no_device(variables: dict[str, str], has_triton: str) -> None:
    """A worker that is forked afterwards chooses its devices: this is a fork of a process that imported it."""
    done = run_program(ASKED, **variables)
    assert done.stdout.split()[-2:] == [has_triton, "False"], done.stderr[-2000:]


@pytest.mark.nightly
def test_a_process_that_imports_vllm_and_configures_nothing_ends_in_silence() -> None:
    """It has found sources quickly until its end."""
    program = "import inspect, vllm.entrypoints.llm\nprint(inspect.getsourcelines.__module__)"
    environ = {name: value for name, value in os.environ.items() if name not in ("VLLM_USE_V2_MODEL_RUNNER", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split()[-1] == "npu_platform.sources"
    assert "Exception ignored" not in done.stderr


@pytest.fixture
def said_nothing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TRITON_DEFAULT_BACKEND", "VLLM_USE_V2_MODEL_RUNNER", "NPU_DEVICE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    availability._unfit.cache_clear()
    monkeypatch.setattr(availability, "_unfit", availability._unfit.__wrapped__)
    return monkeypatch


def test_nothing_stands_against_it_here(said_nothing: pytest.MonkeyPatch) -> None:
    assert availability.why_not_for_vllm() is None
    assert availability.for_vllm()


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler"),
        ({"NPU_DEVICE": "/path/to/driver.so"}, "not for this device (TRITON_DEFAULT_BACKEND=npu runs them)"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"TRITON_DEFAULT_BACKEND": "nvidia"}, "TRITON_DEFAULT_BACKEND=nvidia"),
    ],
)
def test_what_stands_against_it_is_named(environ: dict[str, str], why: str, said_nothing: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        said_nothing.setenv(name, value)
    said = availability.why_not_for_vllm()
    assert said is not None
    assert why in said


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_where_kernels_can_be_kept_nowhere(variable: str, tmp_path: Path, said_nothing: pytest.MonkeyPatch) -> None:
    """As in a service without a home; the start failed with an error of Triton's."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        said_nothing.delenv(name, raising=False)
    said_nothing.setenv(variable, str(tmp_path / "new"))
    assert availability.why_not_for_vllm() is None
    assert not list(tmp_path.iterdir()), "a look makes no folders"
    (tmp_path / "file").touch()
    said_nothing.setenv(variable, str(tmp_path / "file"))
    said = availability.why_not_for_vllm()
    assert said is not None
    assert f"cannot be kept in {tmp_path / 'file'}" in said
    assert availability.missing() == said


def test_a_cache_that_another_user_has_filled_need_not_be_written(
    tmp_path: Path, said_nothing: pytest.MonkeyPatch
) -> None:
    (tmp_path / "npu").mkdir()
    said_nothing.setenv("TRITON_CACHE_DIR", str(tmp_path))
    may = os.access
    said_nothing.setattr(os, "access", lambda path, mode: mode != os.W_OK and may(path, mode))
    assert availability.why_not_for_vllm() is None
    (tmp_path / "npu").rmdir()
    assert "cannot be kept in" in str(availability.why_not_for_vllm())


def test_where_triton_is_not_installed(said_nothing: pytest.MonkeyPatch) -> None:
    said_nothing.setitem(sys.modules, "triton", None)
    said_nothing.setattr(importlib.util, "find_spec", lambda name: None)
    said = availability.why_not_for_vllm()
    assert said == 'Triton is not installed (pip install "npu-platform[triton]")'
    said_nothing.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # asked for, it is said what is missing
    assert availability.for_vllm()
    assert availability.missing() == said


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.4.0", False), ("3.5.0", True), ("3.5.1+git9", True), ("3.10.2", True), ("4.0.0", False)],
)
def test_versions_out_of_the_range_are_not_taken_unasked(
    version: str, fits: bool, said_nothing: pytest.MonkeyPatch
) -> None:
    said_nothing.setattr(importlib.metadata, "version", lambda name: version)
    said = availability.why_not_for_vllm()
    assert said is None if fits else f"Triton {version} is not of the supported range >=3.5,<4" in str(said)


def test_the_range_is_that_of_the_extra() -> None:
    low, high = availability.TRITON_RANGE
    wanted = importlib.metadata.requires("npu-platform") or []
    assert [line for line in wanted if line.startswith("triton")] == [f"triton<{high},>={low}; extra == 'triton'"]
