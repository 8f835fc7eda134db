"""Linear layers with 8-bit floating weights against the exact product of what the weights stand for."""

from __future__ import annotations

import math

import pytest
import torch

from npu_ops import native, panels
from npu_ops.definitions.fp8_linear import fp8_linear

# rows and elements of a scale's block; None: all
BLOCKS = {
    "tensor": (None, None),
    "channel": (1, None),
    "block": (128, 128),
    "small-block": (32, 64),
    "least-block": (32, 32),
}


def layer(n, k, block):
    rows, columns = (size or whole for size, whole in zip(BLOCKS[block], (n, k), strict=True))
    weight = (torch.randn(n, k) * 20).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[: n // 2, ::5] %= 8  # subnormal and zero
    scale = torch.rand(-(-n // rows), -(-k // columns)) * 0.01 + 0.001
    exact = weight.double() * scale.double()[torch.arange(n)[:, None] // rows, torch.arange(k) // columns]
    return weight, scale, rows, columns, exact


def scales_are_rounded(x, k, block_k, packed=False):
    """Whether the scales of blocks are in what meets, rounded to bfloat16 with it: where that is multiplied fastest."""
    most = {"avx512_bf16": 160 if packed else 0, "amx": 128}.get(native.isa(), len(x))  # rows of which they are not
    return x.dtype is torch.bfloat16 and len(x) > most and block_k < k


def check(y, x, exact, bias, dtype, more=0.0):
    expected = x.double() @ exact.t() + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ exact.abs().t() + (0 if bias is None else bias.double().abs())
    allowed = (
        torch.finfo(dtype).eps / 2 * expected.abs() * 1.01 + ((math.sqrt(x.shape[-1]) + 8) * 2**-24 + more) * magnitude
    )
    assert y.dtype == dtype
    assert ((y.cpu().double() - expected).abs() <= allowed + (2**-25 if dtype is torch.float16 else 1e-30)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 12, 13, 24, 25, 33, 100])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (70, 100), (33, 300), (300, 1100)])
def test_equals_the_product(ops, isa, dtype, rows, n, k, block):
    weight, scale, block_n, block_k, exact = layer(n, k, block)
    x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype) if rows % 2 else None
    y = ops.fp8_linear(x, weight, scale, bias, None, 0, block_n, block_k)
    check(y, x, exact, bias, dtype, more=2**-9 if scales_are_rounded(x, k, block_k) else 0.0)


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 25, 160, 161])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (64, 102), (320, 1100)])
def test_packed_weights(ops, isa, dtype, rows, n, k, block):
    weight, scale, block_n, block_k, exact = layer(n, k, block)
    x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype) if rows % 2 else None
    y = ops.fp8_linear(x, panels.pack_bytes(weight), scale, bias, None, 0, block_n, block_k)
    check(y, x, exact, bias, dtype, more=2**-9 if scales_are_rounded(x, k, block_k, packed=True) else 0.0)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(70, 100), (256, 256), (300, 1100)])
def test_many_rows(ops, isa, block, n, k):
    """So many that weights of blocks may be rounded with their scales; no more than weights of bfloat16 would be."""
    weight, scale, block_n, block_k, exact = layer(n, k, block)
    x, bias = torch.randn(150, k).bfloat16(), torch.randn(n).bfloat16()
    y = ops.fp8_linear(x, weight, scale, bias, None, 0, block_n, block_k)
    check(y, x, exact, bias, x.dtype, more=2**-9 if scales_are_rounded(x, k, block_k) else 0.0)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("rows", [2, 20, 50, 150])
@pytest.mark.parametrize(
    ("block", "group"),
    [("channel", 300), ("channel", 64), ("tensor", "static"), ("block", 128), ("block", 300), ("small-block", 32)],
)
def test_rows_that_are_rounded(ops, isa, rows, block, group, packed):
    """The values are those of the reference, whose scales of blocks both sides may round to bfloat16."""
    n, k = 96, 300
    weight, scale, block_n, block_k, _ = layer(n, k, block)
    x = (torch.randn(rows, k) * torch.logspace(-2, 1, k)).bfloat16()
    given, group = (torch.tensor([0.1]), 0) if group == "static" else (None, group)
    of_op = panels.pack_bytes(weight) if packed else weight
    y = ops.fp8_linear(x, of_op, scale, None, given, group, block_n, block_k).double()
    arguments = (weight, scale, None, given, group, block_n, block_k)
    expected = fp8_linear.reference(x.float(), *arguments).double()
    positive = (weight.float().abs().to(weight.dtype), *arguments[1:])
    magnitude = fp8_linear.reference(x.float().abs(), *positive).double()
    rounded = 2 * 2**-9 if scales_are_rounded(x, k, min(block_k, group or k), packed) else 0.0
    error = (y - expected).abs()
    assert (error <= 2**-8 * expected.abs() + (rounded + 2**-12) * magnitude).all(), (error / magnitude).max()
    assert (error / magnitude).mean() <= 2**-10


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("block", BLOCKS)
def test_on_each_device_and_by_the_reference(ops, device, dtype, rows, block):
    weight, scale, block_n, block_k, exact = layer(96, 192, block)
    x, bias = torch.randn(rows, 192).to(dtype), torch.randn(96).to(dtype)
    given = [t.to(device) for t in (x, weight, scale, bias)]
    more = 2**-9 if scales_are_rounded(x, 192, block_k) else 0.0
    check(ops.fp8_linear(*given, None, 0, block_n, block_k), x, exact, bias, dtype, more=more)
    if rows > 12:  # in parts
        many = given[0].repeat(26, 1)
        y = ops.fp8_linear(many, *given[1:], None, 192, block_n, block_k)[-rows:]
        expected = ops.fp8_linear(*given, None, 192, block_n, block_k)
        if scales_are_rounded(many, 192, block_k):
            torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())
        else:
            assert torch.equal(y, expected)
    check(fp8_linear.reference(x, weight, scale, bias, None, 0, block_n, block_k), x, exact, bias, dtype)
    packed = panels.pack_bytes(weight)
    check(fp8_linear.reference(x, packed, scale, bias, None, 0, block_n, block_k), x, exact, bias, dtype)
    y = ops.fp8_linear(given[0], packed.to(device), *given[2:], None, 0, block_n, block_k)
    check(y, x, exact, bias, dtype)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("group", [64, 100, 300, "static"])
def test_rounds_x_as_the_reference(ops, isa, dtype, rows, group):
    """With an identity for weights the result is the rounded x itself: all magnitudes, ties, zero rows and saturation."""
    k = 300
    x = (torch.randn(rows, k) * torch.logspace(-4, 2, k)).to(dtype)
    x[0, :64] = 0
    weight, one = torch.eye(k).to(torch.float8_e4m3fn), torch.ones(1)
    scale = torch.tensor([0.3]) if group == "static" else None
    given = (x, weight, one, None, scale, 0 if group == "static" else group, k, k)
    y, expected = ops.fp8_linear(*given), fp8_linear.reference(*given)
    assert (y != expected).float().mean() < 0.005  # a scale's last bit may move a tie
    assert ((y - expected).float().abs() <= 0.13 * expected.float().abs() + 1e-6).all()


def test_rounding_is_torchs_for_every_half(ops, isa):
    bits = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16).float()
    x = x[x <= 448].view(-1, 1)
    y = ops.fp8_linear(
        torch.cat((x, -x)), torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1), None, torch.ones(1), 0, 1, 1
    )
    assert torch.equal(y, torch.cat((x, -x)).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("group", [0, 32, "static"])
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("bits", [0x7FC0, 0x7FFF, -1], ids=["usual", "full", "negative"])
def test_a_nan_stays_one(ops, isa, rows, group, bits):
    """In the row that holds it, also where x is rounded to e4m3 first."""
    weight, scale, block_n, block_k, _ = layer(40, 96, "tensor")
    x = torch.randn(rows, 96).bfloat16()
    x.view(torch.int16)[1, 77] = bits
    given = torch.tensor([0.3]) if group == "static" else None
    y = ops.fp8_linear(x, weight, scale, None, given, 0 if group == "static" else group, block_n, block_k)
    assert torch.equal(y.isnan(), (torch.arange(rows) == 1)[:, None].expand(rows, 40))


@pytest.mark.parametrize("rows", [3, 20])
def test_strided_rows_and_more_dimensions(ops, isa, dtype, rows):
    weight, scale, block_n, _, exact = layer(48, 200, "tensor")
    x = torch.randn(rows, 3, 96).to(dtype)[..., 16:80]
    y = ops.fp8_linear(x, weight[:, 100:164], scale, None, None, 0, block_n, 64)
    assert y.shape == (rows, 3, 48)
    check(y.flatten(0, 1), x.flatten(0, 1), exact[:, 100:164], None, dtype)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_nothing_in_nothing_out(ops, isa, shape):
    weight, scale, block_n, block_k, _ = layer(8, 64, "tensor")
    y = ops.fp8_linear(torch.randn(shape), weight, scale, None, None, 64, block_n, block_k)
    assert y.shape == (*shape[:-1], 8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.randn(2, 60)}, "weight must be"),
        ({"weight": torch.randn(32, 64)}, "weight must be"),
        ({"scale": torch.rand(2)}, "weight_scale must"),
        ({"bias": torch.rand(31)}, "bias must be"),
        ({"block": (16, 32)}, "blocks must be"),
        ({"block": (2**63 - 1, 2**63 - 1), "scale": torch.rand(0)}, "each of 1 blocks"),
        ({"x": torch.randn(2, 0), "weight": torch.zeros(32, 0).byte(), "scale": torch.rand(0)}, "must have elements"),
        ({"weight": torch.zeros(1, 15, 128, dtype=torch.uint8)}, "weight must be"),
        ({"weight": torch.zeros(1, 16, 128, dtype=torch.uint8), "group": 6}, "beside packed weights"),
    ],
)
def test_mismatches_are_refused(ops, change, match):
    given = {"x": torch.randn(2, 64), "weight": torch.randn(32, 64).to(torch.float8_e4m3fn), "scale": torch.rand(1)}
    given |= {"bias": None, "block": (32, 64), "group": 0} | change
    with pytest.raises(RuntimeError, match=match):
        ops.fp8_linear(
            given["x"], given["weight"], given["scale"], given["bias"], None, given["group"], *given["block"]
        )
