"""Owns what the tests of the kernels share: the tiers, devices and dtypes that they go through, and comparisons.

On the CPU the best instruction set in bfloat16 runs all combinations of a test's other parameters. Of the rest a fixed
choice does, in which any two values of two parameters meet; what that leaves out is marked nightly.
"""

from __future__ import annotations

import itertools
import os
import zlib

import pytest
import torch

import npu_ops

_DEFAULT = npu_ops.native.isa() if npu_ops.native.available() else None
_ON_NPU = npu_ops.native.bind_device()
_NPU_REQUIRED = os.environ.get("NPU_REQUIRE_DEVICE") == "1"  # set by the sessions that have npu-platform installed


def pytest_sessionstart():
    if _NPU_REQUIRED and not _ON_NPU:
        msg = "NPU_REQUIRE_DEVICE=1, but npu-ops found no launch table of an npu device: see npu doctor"
        raise pytest.UsageError(msg)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items):
    seen = set()
    rest = (item for item in items if not is_central(item))
    for item in sorted(rest, key=lambda item: (not can_run(item), zlib.crc32(item.nodeid.encode()))):
        new = pairs_of_values(item) - seen
        seen |= new
        if not new:
            item.add_marker(pytest.mark.nightly)


def is_central(item):
    """Whether all combinations of its other parameters are wanted."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    values = params.get("isa", _DEFAULT), params.get("dtype", torch.bfloat16), params.get("device", "cpu")
    return values == (_DEFAULT, torch.bfloat16, "cpu")


def can_run(item):
    """Whether this machine has what it asks for."""
    params = item.callspec.params
    has_isa = _DEFAULT is not None and npu_ops.native.can_run(params.get("isa", _DEFAULT))
    return has_isa and (_ON_NPU or params.get("device") != "npu")


def pairs_of_values(item):
    """Name the test and two of its parameters' values, for each two parameters; of one alone, its value."""
    values = tuple(enumerate(item.callspec._idlist))  # callspec.indices counts through all combinations
    function = item.nodeid.split("[")[0]
    return {(function, *pair) for pair in itertools.combinations(values, min(2, len(values)))}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=npu_ops.native.isas() or [None])
def isa(request):
    """Each instruction set in turn; those that the machine lacks are skipped."""
    if _DEFAULT is None or not npu_ops.native.can_run(request.param):
        pytest.skip(f"this machine goes up to {npu_ops.native.highest_isa() if _DEFAULT else None}")
    npu_ops.native.set_isa(request.param)
    yield request.param
    npu_ops.native.set_isa(_DEFAULT)


@pytest.fixture
def npu():
    """The npu device, where one is installed."""
    if not _ON_NPU:
        pytest.skip("no npu device with a launch table")
    return "npu"


@pytest.fixture(params=["cpu", pytest.param("npu", marks=pytest.mark.npu_device)])
def device(request):
    """Tensors of the CPU, and of the npu device where one is installed."""
    return request.getfixturevalue("npu") if request.param == "npu" else "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def ops():
    return torch.ops.npu_ops


@pytest.fixture
def equals_product():
    """Compare y with x w^T + bias in float64: its rounding to its own dtype, and c * 2^-24 * sum |a b| for the sums."""

    def check(y, x, w, bias=None, *, more=0.0):
        x, w, bias = x.double(), w.double(), torch.zeros(len(w)) if bias is None else bias.double()
        expected, magnitude = x @ w.t() + bias, x.abs() @ w.abs().t() + bias.abs()
        allowed = torch.finfo(y.dtype).eps / 2 * expected.abs() * 1.01 + more
        allowed += (x.shape[-1] ** 0.5 + 8) * 2**-24 * magnitude
        # tiers with instructions for bfloat16 take subnormal numbers as zero
        allowed += 2**-25 if y.dtype is torch.float16 else 1e-30
        error = (y.cpu().double() - expected).abs()
        assert (error <= allowed).all(), f"off by {(error - allowed).max():.3g} beyond the allowance"

    return check


@pytest.fixture
def close():
    """Compare with a reference in float32: one unit in the last place of the result's dtype, and a little."""

    def check(actual, expected, units=1.0, floor=1e-6):
        eps = torch.finfo(actual.dtype).eps
        actual, expected = actual.cpu().float(), expected.cpu().float()
        assert actual.shape == expected.shape
        allowed = units * eps * expected.abs() + max(floor, eps / 64)
        excess = (actual - expected).abs() - allowed
        assert torch.equal(actual.isnan(), expected.isnan())
        assert not (excess > 0).any(), f"off by {excess.max():.3g} beyond the allowance"

    return check
