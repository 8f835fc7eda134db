"""Linear layers with 4- and 8-bit weights against the exact product of the same quantised weights."""

from __future__ import annotations

import pytest
import torch

from npu_ops import native, panels


def weights_are_rounded(x, group):
    """Whether they meet bfloat16 rows as bfloat16, times their scales: where that is multiplied fastest, with so many rows."""
    group = min(group, 128)
    fewest = {"avx512_bf16": 24 + 3 * group / 4, "amx": max(5, 5 * group / 8)}.get(native.isa(), torch.inf)
    return x.dtype is torch.bfloat16 and x[..., 0].numel() >= fewest


class Layer:
    """Random quantised weights, as the op takes them and as exact floats."""

    def __init__(self, n, k, group, *, bits=4, zeros=False, order=False, scale_dtype=torch.bfloat16):
        self.n, self.k, self.group = n, k, group
        groups = -(-k // group)
        q = torch.randint(0, 16, (n, k)) if bits == 4 else torch.randint(-128, 128, (n, k)).to(torch.int8)
        scales = (torch.rand(n, groups) + 0.5).mul(0.01).to(scale_dtype)
        zero = torch.randint(0, 16, (n, groups)).to(torch.int8) - (8 if bits == 8 else 0)
        self.weight, self.scales = panels.pack(q, bits), panels.pack_groups(scales)
        self.zeros = panels.pack_groups(zero) if zeros else None
        self.order = torch.randperm(k).int() if order else None
        at = torch.arange(k) // group
        base = zero[:, at].double() if zeros else (8 if bits == 4 else 0)
        self.exact = (q.double() - base) * scales[:, at].double()
        # what the 16 (float32: 31) bits of x leave
        self.coarse = self.exact.abs()

    def __call__(self, op, x, bias=None, device="cpu"):
        on = [None if t is None else t.to(device) for t in (self.weight, self.scales, self.zeros, self.order, bias)]
        return op(x.to(device), *on, self.n, self.group)

    def check(self, y, x, bias=None):
        x64 = x.double().flatten(0, -2)
        if self.order is not None:
            x64 = x64[:, self.order.long()]
        expected = x64 @ self.exact.t() + (0 if bias is None else bias.double())
        magnitude = x64.abs() @ self.exact.abs().t() + (0 if bias is None else bias.double().abs())
        block = min(self.group, 128)
        padded = torch.nn.functional.pad(x64.abs(), (0, -self.k % block)).view(len(x64), -1, block)
        largest = padded.amax(-1).repeat_interleave(block, 1)[:, : self.k]
        bits = 15 if x.dtype != torch.float32 else 30
        allowed = torch.finfo(x.dtype).eps / 2 * expected.abs() * 1.01 + (self.k**0.5 + 8) * 2**-24 * magnitude
        allowed += largest @ self.exact.abs().t() * 2**-bits + (2**-25 if x.dtype is torch.float16 else 1e-30)
        if weights_are_rounded(x, self.group):
            allowed += 2**-9 * magnitude
        assert y.dtype == x.dtype
        error = (y.cpu().double().flatten(0, -2) - expected).abs()
        assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 10, 11, 17, 33, 100, 125])
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(64, 256, 128), (70, 96, 32), (33, 192, 64), (5, 100, 100), (40, 520, 520), (300, 1280, 256), (300, 128, 64)],
)
def test_equals_the_product(ops, isa, dtype, rows, n, k, group):
    layer = Layer(n, k, group, zeros=rows % 2 == 1, bits=8 if rows % 3 == 0 else 4)
    x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype) if rows % 2 else None
    layer.check(layer(ops.weight_only_linear, x, bias), x, bias)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_scale_dtypes_order_and_reference(ops, isa, dtype, scale_dtype, zeros, rows):
    layer = Layer(48, 128, 32, zeros=zeros, order=True, scale_dtype=scale_dtype)
    x = torch.randn(rows, 128).to(dtype)
    layer.check(layer(ops.weight_only_linear, x), x)
    from npu_ops.definitions.weight_only_linear import weight_only_linear

    layer.check(layer(weight_only_linear.reference, x), x)


def check_in_company_and_alone(layer, op, x):
    layer.check(layer(op, x), x)
    native.set_batch_invariant(on=True)
    try:
        assert torch.equal(layer(op, x), torch.cat([layer(op, row) for row in x.split(1)]))
    finally:
        native.set_batch_invariant(on=False)


@pytest.mark.parametrize("rows", [1, 3, 17, 40])
@pytest.mark.parametrize(("n", "k"), [(200, 256), (37, 148), (70, 1024 + 32)])
def test_mxfp4(ops, isa, dtype, rows, n, k):
    """Every code and, among the scales, the smallest, which is a subnormal float."""
    layer = Layer(n, k, 32)
    codes, scales = (
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        torch.randint(110, 130, (n, -(-k // 32))).to(torch.uint8),
    )
    scales[0] = 0
    layer.weight, layer.scales = panels.pack(panels.codes_of_e2m1(codes), 4), panels.pack_groups(scales)
    values = torch.tensor([*panels.E2M1, *(-v for v in panels.E2M1)], dtype=torch.float64)[codes.long()]
    layer.exact = values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)[:, :k]
    torch.testing.assert_close(panels.dequantize(layer.weight, layer.scales, None, n, k, 32).double(), layer.exact)
    x = torch.randn(rows, k).to(dtype)
    check_in_company_and_alone(layer, ops.weight_only_linear, x)


@pytest.mark.parametrize("rows", [1, 3, 13, 36, 80])
@pytest.mark.parametrize(("n", "k"), [(200, 256), (37, 148), (70, 1024 + 16)])
def test_nvfp4(ops, isa, dtype, rows, n, k):
    """Every code and every scale, zero, subnormal and negative ones too, each column with a factor of its own."""
    layer = Layer(n, k, 16)
    codes, scales = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.arange(n * -(-k // 16)).reshape(n, -1) % 254
    scales += (scales > 126).long()  # 127 is NaN, and 255
    scales, factors = scales.to(torch.uint8).view(torch.float8_e4m3fn), torch.rand(n) * 0.01 + 1e-4
    layer.weight = panels.pack(panels.codes_of_e2m1(codes), 4)
    layer.scales = panels.pack_scaled_groups(scales, factors)
    values = torch.tensor([*panels.E2M1, *(-v for v in panels.E2M1)], dtype=torch.float64)[codes.long()]
    layer.exact = values * scales.double().repeat_interleave(16, 1)[:, :k] * factors.double()[:, None]
    found = panels.dequantize(layer.weight, layer.scales, None, n, k, 16).double()
    torch.testing.assert_close(found, layer.exact, rtol=2**-22, atol=0)
    x = torch.randn(rows, k).to(dtype)
    check_in_company_and_alone(layer, ops.weight_only_linear, x)


@pytest.mark.parametrize("rows", [1, 3, 13, 36, 80])
@pytest.mark.parametrize(("n", "k"), [(200, 256), (37, 148), (70, 1024 + 32)])
def test_mxfp8(ops, isa, dtype, rows, n, k):
    """Every code but NaN, zero of both signs too, and among the scales all that bfloat16 can hold beside each code."""
    layer = Layer(n, k, 32)
    codes, scales = torch.arange(n * k).reshape(n, k) % 254, torch.randint(110, 130, (n, -(-k // 32)))
    codes += (codes > 126).long()  # 127 is NaN, and 255
    scales[0], scales[1] = 10, 120 if dtype is torch.float16 else 200
    weight = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    layer.weight = panels.pack(panels.e4m3_codes(weight), 8)
    layer.scales = panels.pack_groups(scales.to(torch.uint8))
    layer.exact = weight.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)[:, :k]
    torch.testing.assert_close(panels.dequantize(layer.weight, layer.scales, None, n, k, 32).double(), layer.exact)
    x = torch.randn(rows, k).to(dtype)
    check_in_company_and_alone(layer, ops.weight_only_linear, x)


@pytest.mark.parametrize("rows", [1, 40])
def test_on_each_device(ops, device, dtype, rows):
    layer = Layer(96, 128, 64, zeros=True, order=True)
    x, bias = torch.randn(rows, 128).to(dtype), torch.randn(96).to(dtype)
    layer.check(layer(ops.weight_only_linear, x, bias, device), x, bias)


def test_a_row_is_the_same_whatever_shares_the_batch(ops, isa, dtype):
    layer, x = Layer(64, 256, 128, zeros=True), torch.randn(1100, 256).to(dtype)
    counts = (1, 2, 4, 9, 23, 79, 80, 100, 119, 120, 517, 600, 1100)
    for rounded in (False, True):
        alike = [rows for rows in counts if weights_are_rounded(x[:rows], 128) is rounded]
        results = [layer(ops.weight_only_linear, x[:rows]) for rows in alike]
        assert all(torch.equal(y, results[-1][: len(y)]) for y in results)


def test_strided_rows_and_more_dimensions(ops, isa, dtype):
    layer, x = Layer(32, 64, 32), torch.randn(4, 3, 96).to(dtype)[..., 16:80]
    y = layer(ops.weight_only_linear, x)
    assert y.shape == (4, 3, 32)
    layer.check(y, x)


def test_bfloat16_loses_little_beside_its_own_rounding(ops, isa):
    """Normal activations with some a hundred times larger: the 16-bit blocks add under a tenth to the output's rounding."""
    layer, x = Layer(256, 1024, 128), torch.randn(8, 1024)
    x[:, ::97] *= 100
    x = x.bfloat16()
    exact = x.double() @ layer.exact.t()
    rounding = (exact.bfloat16().double() - exact).square().mean().sqrt()
    error = (layer(ops.weight_only_linear, x).double() - exact).square().mean().sqrt()
    assert error <= 1.1 * rounding


def test_bfloat16_of_many_rows_loses_no_more_than_with_bfloat16_weights(ops, isa):
    layer, x = Layer(256, 1024, 128), torch.randn(128, 1024).bfloat16()
    exact = x.double() @ layer.exact.t()
    of_rounded = (x.double() @ layer.exact.bfloat16().double().t()).bfloat16().double()
    error = (layer(ops.weight_only_linear, x).double() - exact).square().mean().sqrt()
    assert error <= 1.02 * (of_rounded - exact).square().mean().sqrt()


def test_zero_tiny_and_infinite_rows(ops, isa):
    layer, x = Layer(32, 128, 64), torch.zeros(4, 128)
    x[1], x[2, 5], x[3, 100] = 1e-38, torch.inf, torch.nan
    y = layer(ops.weight_only_linear, x.bfloat16())
    assert not y[0].any()
    assert y[1].isfinite().all()
    if native.isa() == "avx512_bf16":  # where rows stay as they are
        torch.testing.assert_close(y[2].double(), x[2].double() @ layer.exact.t(), equal_nan=True)
    else:
        assert y[2].isnan().all()
    assert y[3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_nothing_in_nothing_out(ops, isa, shape):
    assert Layer(32, 64, 32)(ops.weight_only_linear, torch.randn(shape)).shape == (*shape[:-1], 32)


EIGHT = torch.zeros(1, 16, 128, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.randn(2, 60)}, "weight must be"),
        ({"scales": torch.rand(1, 2, 32)}, "scales must be"),
        ({"zeros": torch.zeros(1, 2, 32, dtype=torch.int8)}, "zeros must be"),
        ({"bias": torch.rand(31)}, "bias must be"),
        ({"order": torch.arange(63).int()}, "order must be"),
        ({"group": 48}, "group_size must divide"),
        ({"group": 2**63 - 1, "scales": torch.rand(1, 0, 32)}, "scales must be"),
        ({"group": 16, "scales": torch.zeros(1, 4, 32, dtype=torch.uint8)}, "groups of MXFP4 have 32"),
        ({"group": 32, "scales": torch.zeros(1, 6, 32).to(torch.float8_e4m3fn)}, "groups of NVFP4 have 16"),
        ({"weight": EIGHT, "scales": torch.zeros(1, 4, 32, dtype=torch.uint8)}, "groups of MXFP8 have 32"),
        ({"weight": EIGHT, "scales": torch.zeros(1, 8, 32).to(torch.float8_e4m3fn)}, "with weights of 4 bits"),
    ],
)
def test_mismatches_are_refused(ops, change, match):
    layer = Layer(32, 64, 16)
    given = {"x": torch.randn(2, 64), "weight": layer.weight, "scales": layer.scales, "zeros": None, "order": None}
    given |= {"bias": None, "group": 16} | change
    with pytest.raises(RuntimeError, match=match):
        ops.weight_only_linear(
            *(given[of] for of in ("x", "weight", "scales", "zeros", "order", "bias")), 32, given["group"]
        )
