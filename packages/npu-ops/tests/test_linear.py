from __future__ import annotations

import math

import pytest
import torch


def check(actual, x, w, bias, dtype):
    """|error| <= final rounding + c * 2^-24 * sum |a b|, against float64."""
    x64, w64 = x.double(), w.double()
    expected = x64 @ w64.t() + (0 if bias is None else bias.double())
    magnitude = x64.abs() @ w64.abs().t() + (0 if bias is None else bias.double().abs())
    allowed = torch.finfo(dtype).eps / 2 * expected.abs() * 1.01 + (math.sqrt(x.shape[-1]) + 8) * 2**-24 * magnitude
    # bfloat16 products on AVX-512 flush subnormal inputs
    allowed = allowed + 1e-30 if dtype is not torch.float16 else allowed + 2**-25
    assert actual.dtype == dtype
    assert ((actual.cpu().double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 31, 33, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 100), (33, 257), (5, 1), (1, 40), (200, 520)])
def test_equals_the_product(ops, isa, dtype, rows, n, k):
    x, w = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype) if rows % 2 else None
    check(ops.linear(x, w, bias), x, w, bias, dtype)


def test_rows_so_long_that_a_cache_holds_few(ops, isa, dtype):
    x, w = torch.randn(40, 17000).to(dtype), torch.randn(33, 17000).to(dtype)
    check(ops.linear(x, w, None), x, w, None, dtype)


@pytest.mark.parametrize("rows", [1, 9, 40, 150])
def test_on_each_device(ops, device, dtype, rows):
    x, w, bias = torch.randn(rows, 128).to(dtype), torch.randn(192, 128).to(dtype), torch.randn(192).to(dtype)
    check(ops.linear(x.to(device), w.to(device), bias.to(device)), x, w, bias, dtype)


@pytest.mark.parametrize("rows", [4, 24])
def test_strided_rows_and_more_dimensions(ops, isa, dtype, rows):
    x, w = torch.randn(rows, 3, 96).to(dtype), torch.randn(48, 200).to(dtype)
    y = ops.linear(x[..., 16:80], w[:, 100:164], None)
    assert y.shape == (rows, 3, 48)
    check(y.flatten(0, 1), x[..., 16:80].flatten(0, 1), w[:, 100:164], None, dtype)


@pytest.mark.parametrize("rows", [2, 3, 4, 11, 33])
def test_long_rows(ops, isa, dtype, rows):
    """Longer than what is multiplied in one go, at odd addresses, further apart than they are long."""
    x, w = torch.randn(rows, 3200).to(dtype)[:, 5:3106], torch.randn(53, 3200).to(dtype)[:, 7:3108]
    check(ops.linear(x, w, None), x, w, None, dtype)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_nothing_in_nothing_out(ops, isa, shape):
    assert ops.linear(torch.randn(shape), torch.randn(8, 16), None).shape == (*shape[:-1], 8)


def test_same_result_each_time(ops, isa):
    x, w = torch.randn(5, 512).bfloat16(), torch.randn(96, 512).bfloat16()
    assert torch.equal(ops.linear(x, w, None), ops.linear(x, w, None))


@pytest.mark.parametrize(
    ("x", "w", "bias", "match"),
    [
        (torch.randn(2, 8), torch.randn(4, 9), None, "last dimension"),
        (torch.randn(2, 8), torch.randn(4, 8).bfloat16(), None, "dtype"),
        (torch.randn(2, 8), torch.randn(4, 8), torch.randn(5), "bias"),
        (torch.randn(2, 8), torch.randn(8, 4).t(), None, "contiguous"),
    ],
)
def test_mismatches_are_refused(ops, x, w, bias, match):
    with pytest.raises(RuntimeError, match=match):
        ops.linear(x, w, bias)
