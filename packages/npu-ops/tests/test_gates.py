from __future__ import annotations

import pytest
import torch

from npu_ops.definitions import gates

SLOPES = (torch.tensor([0.3]), torch.tensor([-1.2]))
CASES = {
    "mul_and_silu": (),
    "fatrelu_and_mul": (0.25,),
    "situ_and_mul": (1.5, 2.0),
    "silu_and_mul_with_clamp": (3.0, 1.7, 1.0),
    "swigluoai_and_mul": (1.702, 3.0),
    "swiglustep_and_mul": (2.0,),
    "gelu_and_mul_sparse": (0.7, True),
    "xielu": (*SLOPES, 0.5, -1e-6),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(1, 4100), (2, 3, 34), (0, 4)])
def test_gates_equal_their_formulas(ops, isa, device, dtype, close, name, shape):
    x = (4 * torch.randn(shape)).to(dtype)
    numbers = CASES[name]
    there = [n.to(device) if isinstance(n, torch.Tensor) else n for n in numbers]
    # one cutoff for a row: its rounding meets every up
    floor = 2e-5 if name == "gelu_and_mul_sparse" else 4e-6
    close(getattr(ops, name)(x.to(device), *there), formula(name, x.float(), *numbers).to(dtype), floor=floor)


def test_up_may_be_unclipped_and_gelu_exact(ops, isa, close):
    x = 4 * torch.randn(3, 34)
    close(ops.situ_and_mul(x, 1.5, 0.0), formula("situ_and_mul", x, 1.5, 0.0), floor=4e-6)
    close(ops.gelu_and_mul_sparse(x, 0.7, False), formula("gelu_and_mul_sparse", x, 0.7, False), floor=4e-6)


@pytest.mark.parametrize("name", CASES)
def test_rows_may_be_apart(ops, isa, close, name):
    x = torch.randn(6, 80)[:, 8:72]
    close(getattr(ops, name)(x, *CASES[name]), formula(name, x, *CASES[name]), floor=4e-6)


@pytest.mark.parametrize("name", ["fatrelu_and_mul", "silu_and_mul_with_clamp", "swiglustep_and_mul", "situ_and_mul"])
def test_what_is_not_a_number_stays_so_where_it_stands(ops, isa, name):
    gate, up = torch.tensor([1.0, float("nan"), 100.0, -100.0] * 5), torch.tensor([2.0, 2.0, float("nan"), 100.0] * 5)
    y = getattr(ops, name)(torch.cat([gate, up]), *CASES[name])
    assert y.isnan().tolist() == [False, True, True, False] * 5


def test_xielu_far_and_near_zero(ops, isa, close):
    x = torch.tensor([-float("inf"), -1e4, -20.0, -0.5, -0.1, -1e-3, -1e-7, 0.0, 1e-3, 30.0, float("nan")])
    close(ops.xielu(x, *CASES["xielu"]), gates.xielu.reference(x, *CASES["xielu"]))


def test_odd_width_is_refused(ops):
    with pytest.raises(RuntimeError, match="even"):
        ops.mul_and_silu(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="one element"):
        ops.xielu(torch.randn(2, 7), torch.randn(2), torch.randn(2), 0.5, -1e-6)


def formula(name, x, *numbers):
    return getattr(gates, name).reference(x, *numbers)
