from __future__ import annotations

import os
import subprocess
import sys

import pytest

import npu_ops
from npu_ops.config import ISAS, OpsConfig
from npu_ops.errors import ConfigError


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_the_best_isa_is_the_default():
    assert run("import npu_ops; print(npu_ops.native.isa())", NPU_ISA="").stdout.strip() == npu_ops.native.highest_isa()


def test_environment_forces_a_lower_isa():
    result = run("import npu_ops; print(npu_ops.native.isa())", NPU_ISA="scalar")
    assert result.stdout.strip() == "scalar", result.stderr


def test_unknown_isa_is_refused(monkeypatch):
    monkeypatch.setenv("NPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="scalar, avx2, avx512, avx512_bf16, amx, got 'sse9'"):
        OpsConfig.from_environment()


def test_isa_beyond_the_machine_is_refused():
    missing = [name for name in ISAS if not npu_ops.native.can_run(name)]
    if not missing:
        pytest.skip("this machine has all of them")
    with pytest.raises(ConfigError, match="this machine goes up to"):
        npu_ops.native.set_isa(missing[0])


def test_a_tier_above_the_machine_is_called_emulated(isa):
    best = ISAS.index(npu_ops.native.highest_isa())
    assert npu_ops.native.is_emulated() == (ISAS.index(isa) > best)


def test_loading_twice_is_harmless():
    npu_ops.native.load()
    assert npu_ops.native.available()


def test_import_needs_no_vllm():
    result = run("import sys, npu_ops; assert 'vllm' not in sys.modules; print('fine')")
    assert result.stdout.strip() == "fine", result.stderr


def test_narrow_tiers_hold_no_wide_instruction():
    """An inline function compiled with wide instructions must not become the copy that baseline code calls."""
    library = npu_ops.native._find_library()
    try:
        symbols = subprocess.run(["nm", "-C", str(library)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no nm on this machine")
    weak = [line for line in symbols.splitlines() if " W " in line and "npu_ops::" in line and "{lambda" in line]
    assert not [line for line in weak if "anonymous namespace" in line]
