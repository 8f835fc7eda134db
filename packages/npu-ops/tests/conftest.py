from __future__ import annotations

import os

import pytest
import torch

import npu_ops
from npu_ops.config import ISAS

_DEFAULT = npu_ops.native.isa() if npu_ops.native.available() else None
_ON_NPU = npu_ops.native.bind_device()
_NPU_REQUIRED = os.environ.get("NPU_REQUIRE_DEVICE") == "1"  # set by the sessions that have npu-platform installed


def pytest_sessionstart():
    if _NPU_REQUIRED and not _ON_NPU:
        msg = "NPU_REQUIRE_DEVICE=1, but npu-ops found no launch table of an npu device: see npu doctor"
        raise pytest.UsageError(msg)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=ISAS)
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
