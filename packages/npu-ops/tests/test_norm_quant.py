"""Norm and quantisation in one op: what the two ops give, and the float8 codes of the definition."""

from __future__ import annotations

import pytest
import torch

from npu_ops.definitions.norm_quant import rms_norm_dynamic_quant, rms_norm_static_quant

FP8 = torch.float8_e4m3fn
EPS = 1e-6


def inputs(shape, dtype, device, fused):
    wide = torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)
    x = wide[..., : shape[-1]].to(device) if fused else wide.to(device)[..., : shape[-1]]
    residual = torch.randn(shape).to(device, dtype) if fused else None
    return x, residual, torch.randn(shape[-1]).to(device, dtype)


def two_steps(ops, x, residual, weight):
    """The normed rows; the residual is written."""
    if residual is None:
        return ops.rms_norm(x, weight, EPS)
    y = x.clone(memory_format=torch.contiguous_format)
    ops.fused_add_rms_norm(y, residual, weight, EPS)
    return y


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 3, 13), (5, 1), (0, 8)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_codes_are_those_of_two_ops(ops, isa, device, dtype, shape, fused, symmetric):
    x, residual, weight = inputs(shape, dtype, device, fused)
    other = None if residual is None else residual.clone()
    expected = ops.dynamic_int8_quant(two_steps(ops, x, other, weight), symmetric)
    actual = ops.rms_norm_dynamic_quant(x, residual, weight, EPS, symmetric, torch.int8)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    if residual is not None:
        assert torch.equal(residual, other)


@pytest.mark.parametrize("fused", [False, True])
def test_int8_codes_by_a_given_scale(ops, isa, device, dtype, fused):
    x, residual, weight = inputs((4, 77), dtype, device, fused)
    scale = torch.tensor([0.013], device=device)
    other = None if residual is None else residual.clone()
    expected = ops.static_int8_quant(two_steps(ops, x, other, weight), scale, None)
    assert torch.equal(ops.rms_norm_static_quant(x, residual, weight, EPS, scale, torch.int8), expected)


def test_rows_that_have_to_be_copied(ops, isa):
    """Of a strided last dimension, and of more than two strides: the copy lives as long as the kernel."""
    weight, scale = torch.ones(96).bfloat16(), torch.tensor([0.02])
    for x in (torch.randn(96, 300).t().bfloat16(), torch.randn(3, 5, 7, 96).permute(2, 0, 1, 3).bfloat16()):
        actual = ops.rms_norm_static_quant(x, None, weight, EPS, scale, torch.int8)
        assert torch.equal(actual, ops.rms_norm_static_quant(x.contiguous(), None, weight, EPS, scale, torch.int8))


@pytest.mark.parametrize("code", [torch.int8, FP8], ids=["int8", "e4m3"])
def test_a_nan_is_the_scale_of_its_row(ops, isa, dtype, code):
    x, weight = torch.randn(3, 50).to(dtype), torch.ones(50).to(dtype)
    x[1, 7] = torch.nan
    _, scale, _ = ops.rms_norm_dynamic_quant(x, None, weight, EPS, True, code)
    assert scale.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(3, 100), (2, 3, 13)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_float8_codes_are_the_definitions(ops, isa, device, dtype, shape, fused, static):
    x, residual, weight = inputs(shape, dtype, device, fused)
    x[..., :1, :] = 0
    host = x.cpu(), None if residual is None else residual.cpu().clone(), weight.cpu(), EPS
    if static:
        scale = torch.tensor([0.02])
        expected = rms_norm_static_quant.reference(*host, scale, FP8)
        codes = ops.rms_norm_static_quant(x, residual, weight, EPS, scale.to(device), FP8)
    else:
        expected, scale, _ = rms_norm_dynamic_quant.reference(*host, True, FP8)
        codes, found, zero = ops.rms_norm_dynamic_quant(x, residual, weight, EPS, True, FP8)
        torch.testing.assert_close(found.cpu(), scale, rtol=max(1e-6, torch.finfo(dtype).eps), atol=0)
        assert zero.numel() == 0
    assert codes.dtype == FP8
    # a value on the edge between two codes may fall either way: the next code is an eighth away, or a subnormal's step
    actual, expected = codes.cpu().float(), expected.float()
    assert ((actual - expected).abs() <= expected.abs() / 8 + 2**-9).all()
    assert (actual != expected).float().mean() < 0.03


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": torch.uint8}, "int8 or float8_e4m3fn"),
        ({"dtype": FP8, "symmetric": False}, "no zero points"),
        ({"residual": torch.zeros(2, 9)}, "residual must be"),
        ({"weight": torch.zeros(9)}, "weight must be"),
    ],
)
def test_what_does_not_fit_is_refused(ops, change, match):
    given = {"x": torch.zeros(2, 8), "residual": None, "weight": torch.ones(8)}
    given |= {"eps": EPS, "symmetric": True, "dtype": torch.int8} | change
    with pytest.raises(RuntimeError, match=match):
        ops.rms_norm_dynamic_quant(*given.values())
