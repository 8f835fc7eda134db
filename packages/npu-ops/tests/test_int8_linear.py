"""8-bit linear layers: sums bit-exact, scaling to one unit of the result; and the quantisation of activations."""

from __future__ import annotations

import math

import pytest
import torch

from npu_ops import panels
from npu_ops.definitions.int8_linear import dynamic_int8_quant, static_int8_quant


def packed(w, scale):
    pad = -len(w) % 32
    sums = torch.nn.functional.pad(w.int().sum(-1), (0, pad)).int()
    return panels.pack(w, 8), torch.nn.functional.pad(scale, (0, pad)), sums


def exact(x, w, zero):
    return (x.double() - zero.double()) @ w.double().t()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 17, 33, 70])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 100), (33, 13), (40, 700), (300, 1100)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_sums_are_exact(ops, isa, rows, n, k, asymmetric):
    """All values, the most negative too; with scales of one, float32 shows the sums themselves."""
    x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((rows, k), (n, k)))
    zero = torch.randint(-128, 128, (rows, 1), dtype=torch.int32) if asymmetric else None
    weight, scale, sums = packed(w, torch.ones(n))
    y = ops.int8_linear(x, torch.ones(rows, 1), zero, weight, scale, sums, None, n, torch.float32)
    expected = exact(x, w, torch.zeros(1) if zero is None else zero)
    assert torch.equal(y, expected.float())


def test_extremes_do_not_overflow(ops, isa):
    x, w = torch.full((3, 4096), -128, dtype=torch.int8), torch.full((32, 4096), -128, dtype=torch.int8)
    weight, scale, _ = packed(w, torch.ones(32))
    y = ops.int8_linear(x, torch.ones(1), None, weight, scale, None, None, 32, torch.float32)
    assert (y == 128 * 128 * 4096).all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("per_token", [False, True])
def test_scales_bias_and_devices(ops, device, dtype, rows, per_token):
    n, k = 70, 132
    x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((2, rows, k), (n, k)))
    x_scale = torch.rand(2 * rows, 1) if per_token else torch.rand(1)
    zero = torch.randint(-9, 9, x_scale.shape, dtype=torch.int32)
    w_scale, bias = torch.rand(n) * 0.001, torch.randn(n).to(dtype)
    given = [t.to(device) for t in (x, x_scale, zero, *packed(w, w_scale), bias)]
    y = ops.int8_linear(*given, n, dtype)
    assert y.dtype == dtype
    assert y.shape == (2, rows, n)
    expected = (
        exact(x.flatten(0, 1), w, zero.view(-1, 1)) * x_scale.view(-1, 1).double() * w_scale.double() + bias.double()
    )
    error = (y.cpu().flatten(0, 1).double() - expected).abs()
    slack = 2**-25 if dtype is torch.float16 else 1e-30
    assert (
        error <= torch.finfo(dtype).eps * 1.01 * expected.abs() + 2**-22 * (expected.abs() + bias.abs().max()) + slack
    ).all()


def test_a_row_is_the_same_whatever_shares_the_batch(ops, isa):
    x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((1100, 300), (64, 300)))
    scale = torch.rand(1100, 1)
    given = packed(w, torch.rand(64))
    together = ops.int8_linear(x, scale, None, *given, None, 64, torch.bfloat16)
    for rows in (1, 4, 7, 20):
        assert torch.equal(
            ops.int8_linear(x[:rows], scale[:rows], None, *given, None, 64, torch.bfloat16), together[:rows]
        )


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 13), (1, 1), (4, 100), (0, 8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantises_as_the_reference(ops, isa, device, dtype, shape, symmetric):
    x = (torch.randn(shape) * 3 + (0 if symmetric else 2)).to(dtype)
    x[..., :1, :] = 0
    expected = dynamic_int8_quant.reference(x, symmetric)
    q, scale, zero = (t.cpu() for t in ops.dynamic_int8_quant(x.to(device), symmetric))
    assert (zero.shape, zero.dtype) == (expected[2].shape, torch.int32)
    torch.testing.assert_close(scale, expected[1], rtol=1e-6, atol=0)
    assert torch.equal(zero, expected[2])
    # a value on the edge between two integers may fall either way
    assert ((q.int() - expected[0].int()).abs() <= 1).all()
    assert (q != expected[0]).float().mean().nan_to_num() < 0.02


def test_static_quantisation_saturates(ops, isa, device, dtype):
    x = torch.tensor([[-1e4, -3.0, 0.0, 0.26, 3.0, 1e4, 0.5]]).to(dtype)
    for zero in (None, torch.tensor([5], dtype=torch.int32)):
        q = ops.static_int8_quant(
            x.to(device), torch.tensor([0.5]).to(device), zero if zero is None else zero.to(device)
        )
        assert torch.equal(q.cpu(), static_int8_quant.reference(x, torch.tensor([0.5]), zero))
        assert q.min() == -128
        assert q.max() == 127


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_row_with_an_infinity_has_an_infinite_scale(ops, isa, symmetric):
    x = torch.randn(3, 100)
    x[1, 77] = -math.inf
    for found in (ops.dynamic_int8_quant(x, symmetric), dynamic_int8_quant.reference(x, symmetric)):
        assert found[1].isinf().flatten().tolist() == [False, True, False]
        assert symmetric or found[2][1] == 0


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [0x7FC0, 0x7FFF, -1], ids=["usual", "full", "negative"])
def test_a_nan_is_the_scale_of_its_token(ops, isa, symmetric, bits):
    """int8 has no code for it: all results of the token are NaN instead, and no other's. A given scale loses it."""
    n, x = 40, torch.randn(3, 100).bfloat16()
    x.view(torch.int16)[1, 77] = bits
    weight, scale, sums = packed(torch.randint(-128, 128, (n, 100), dtype=torch.int8), torch.rand(n) * 0.01)
    for found in (ops.dynamic_int8_quant(x, symmetric), dynamic_int8_quant.reference(x, symmetric)):
        assert found[1].isnan().flatten().tolist() == [False, True, False]
    y = ops.int8_linear_dynamic(x, symmetric, weight, scale, None if symmetric else sums, None, n)
    assert torch.equal(y.isnan(), torch.tensor([[False], [True], [False]]).expand(3, n))
    codes = ops.static_int8_quant(x, torch.tensor([0.5]), None)
    assert codes[1, 77] == -128
    assert torch.equal(codes, static_int8_quant.reference(x, torch.tensor([0.5]), None))


@pytest.mark.parametrize("shape", [(1, 64), (2, 9, 130), (0, 8), (1030, 12)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_steps_at_once_are_the_two_steps(ops, isa, device, dtype, shape, symmetric):
    n = 70
    x, w = torch.randn(shape).to(dtype), torch.randint(-128, 128, (n, shape[-1]), dtype=torch.int8)
    x = torch.cat([x, x], dim=-1)[..., : shape[-1]]  # rows further apart than they are long
    weight, scale, sums = (t.to(device) for t in packed(w, torch.rand(n) * 0.01))
    sums = None if symmetric else sums
    x, bias = x.to(device), torch.randn(n).to(device, dtype)
    q, x_scale, zero = ops.dynamic_int8_quant(x, symmetric)
    expected = ops.int8_linear(q, x_scale, zero, weight, scale, sums, bias, n, dtype)
    assert torch.equal(ops.int8_linear_dynamic(x, symmetric, weight, scale, sums, bias, n), expected)


def test_zero_points_need_the_weights_sums(ops):
    weight = torch.zeros(1, 3, 128, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="need weight_sum"):
        ops.int8_linear_dynamic(torch.zeros(2, 9), False, weight, torch.ones(32), None, None, 32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.zeros(2, 9)}, "x must be int8"),
        ({"weight": torch.zeros(1, 2, 128, dtype=torch.uint8)}, "weight must be"),
        ({"x_scale": torch.ones(3)}, "x_scale must be"),
        ({"x_zero": torch.zeros(2, 1, dtype=torch.int32)}, "weight_sum"),
        ({"bias": torch.zeros(32).half()}, "bias must be"),
    ],
)
def test_mismatches_are_refused(ops, change, match):
    given = {"x": torch.zeros(2, 9, dtype=torch.int8), "x_scale": torch.ones(2, 1), "x_zero": None}
    given |= {"weight": torch.zeros(1, 3, 128, dtype=torch.uint8), "bias": None} | change
    with pytest.raises(RuntimeError, match=match):
        ops.int8_linear(
            given["x"],
            given["x_scale"],
            given["x_zero"],
            given["weight"],
            torch.ones(32),
            None,
            given["bias"],
            32,
            torch.float32,
        )
