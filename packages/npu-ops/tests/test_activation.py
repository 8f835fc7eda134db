from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

PLAIN = {
    "gelu-erf": (lambda o, x: o.gelu(x, False), F.gelu),
    "gelu-tanh": (lambda o, x: o.gelu(x, True), lambda x: F.gelu(x, approximate="tanh")),
    "quick": (lambda o, x: o.quick_gelu(x), lambda x: x * torch.sigmoid(1.702 * x)),
    "relu2": (lambda o, x: o.relu2(x), lambda x: F.relu(x).square()),
}
GATED = {
    "silu": (lambda o, x: o.silu_and_mul(x), F.silu),
    "gelu-erf": (lambda o, x: o.gelu_and_mul(x, False), F.gelu),
    "gelu-tanh": (lambda o, x: o.gelu_and_mul(x, True), lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", [(3, 1000), (2, 3, 5), (0, 4)])
def test_plain(ops, isa, device, dtype, close, name, shape):
    x = (4 * torch.randn(shape)).to(dtype)
    native, formula = PLAIN[name]
    close(native(ops, x.to(device)), formula(x.double()))


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("shape", [(1, 6144), (3, 34), (2, 3, 4098)])
def test_gated(ops, isa, device, dtype, close, name, shape):
    x = (4 * torch.randn(shape)).to(dtype)
    native, formula = GATED[name]
    gate, up = x.double().chunk(2, dim=-1)
    close(native(ops, x.to(device)), formula(gate).to(dtype).double() * up, units=2, floor=4e-6)


def test_rows_may_be_apart(ops, isa, close):
    x = torch.randn(6, 80)[:, 8:72]
    gate, up = x.chunk(2, dim=-1)
    close(ops.silu_and_mul(x), F.silu(gate) * up, units=2)


@pytest.mark.parametrize("name", GATED)
def test_extremes_stay_finite_or_true(ops, isa, name):
    x = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("nan"), float("inf")] + [1.0] * 8])
    y = GATED[name][0](ops, x)[0]
    assert torch.equal(y[:6], torch.tensor([-0.0, -0.0, -0.0, 0.0, 90.0, 1e30]))
    assert y[6].isnan()
    assert y[7] == float("inf")


def test_odd_width_is_refused(ops):
    with pytest.raises(RuntimeError, match="even"):
        ops.silu_and_mul(torch.randn(2, 7))


@pytest.mark.parametrize("name", PLAIN)
def test_a_nan_stays_one(ops, isa, dtype, name):
    x = torch.zeros(40, dtype=dtype)
    x[[3, 33, 39]] = torch.nan
    assert torch.equal(PLAIN[name][0](ops, x).isnan(), x.isnan())
