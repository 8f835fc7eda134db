from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 21, 24, 27, 28, 33, 44, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 100), (33, 257), (66, 103), (9, 42), (5, 1), (1, 40), (200, 520)])
def test_equals_the_product(ops, equals_product, isa, dtype, rows, n, k):
    x, w = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype) if rows % 2 else None
    y = ops.linear(x, w, bias)
    assert y.dtype == dtype
    equals_product(y, x, w, bias)


@pytest.mark.parametrize("rows", [64, 80, 96, 128, 129, 130, 139, 333, 1100])
@pytest.mark.parametrize(("n", "k"), [(300, 1100), (33, 41), (65, 2048), (40, 5003), (512, 72)])
def test_many_rows(ops, equals_product, isa, rows, n, k):
    x, w, bias = torch.randn(rows, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(n).bfloat16()
    equals_product(ops.linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize("rows", [3, 6, 7, 8, 11, 15])
@pytest.mark.parametrize("k", [2048, 3100, 6200])
def test_few_rows_that_l1_does_not_hold(ops, equals_product, isa, rows, k):
    x, w = torch.randn(rows, k).bfloat16(), torch.randn(100, k).bfloat16()
    equals_product(ops.linear(x, w, None), x, w)


def test_rows_so_long_that_a_cache_holds_few(ops, equals_product, isa, dtype):
    x, w = torch.randn(40, 17000).to(dtype), torch.randn(33, 17000).to(dtype)
    equals_product(ops.linear(x, w, None), x, w)


@pytest.mark.parametrize("rows", [1, 9, 40, 150])
def test_on_each_device(ops, equals_product, device, dtype, rows):
    x, w, bias = torch.randn(rows, 128).to(dtype), torch.randn(192, 128).to(dtype), torch.randn(192).to(dtype)
    equals_product(ops.linear(x.to(device), w.to(device), bias.to(device)), x, w, bias)


@pytest.mark.parametrize("rows", [4, 24])
def test_strided_rows_and_more_dimensions(ops, equals_product, isa, dtype, rows):
    x, w = torch.randn(rows, 3, 96).to(dtype), torch.randn(48, 200).to(dtype)
    y = ops.linear(x[..., 16:80], w[:, 100:164], None)
    assert y.shape == (rows, 3, 48)
    equals_product(y.flatten(0, 1), x[..., 16:80].flatten(0, 1), w[:, 100:164])


@pytest.mark.parametrize("rows", [2, 3, 4, 11, 33])
def test_long_rows(ops, equals_product, isa, dtype, rows):
    """Longer than what is multiplied in one go, at odd addresses, further apart than they are long."""
    x, w = torch.randn(rows, 3200).to(dtype)[:, 5:3106], torch.randn(53, 3200).to(dtype)[:, 7:3108]
    equals_product(ops.linear(x, w, None), x, w)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_nothing_in_nothing_out(ops, isa, shape):
    assert ops.linear(torch.randn(shape), torch.randn(8, 16), None).shape == (*shape[:-1], 8)


def test_same_result_each_time(ops, isa):
    x, w = torch.randn(5, 512).bfloat16(), torch.randn(96, 512).bfloat16()
    assert torch.equal(ops.linear(x, w, None), ops.linear(x, w, None))


def test_every_product_is_rounded_as_torch_does(ops, isa):
    """All bfloat16 numbers, infinities and NaNs; the tiers with instructions for bfloat16 take subnormals as zero."""
    w = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    x = torch.tensor([[1.0], [-1.0078125], [1.5]]).bfloat16()
    exact, y = x.float() @ w.float().t(), ops.linear(x, w, None)
    expected = exact.bfloat16()
    least = torch.finfo(torch.bfloat16).smallest_normal
    subnormal = (exact.abs() < least) | (w.t().abs() < least)
    if isa in {"avx512_bf16", "amx"}:
        assert not y[subnormal].any()
        expected[subnormal] = 0
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))


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
