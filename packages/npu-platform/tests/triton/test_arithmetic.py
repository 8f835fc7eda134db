"""Element-wise operations of Triton against torch, many in a kernel, over the types of numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

N = 64


@triton.jit
def integer_kernel(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, a + b)
    tl.store(o + N + i, a - b)
    tl.store(o + 2 * N + i, a * b)
    tl.store(o + 3 * N + i, (a // b).to(a.dtype))
    tl.store(o + 4 * N + i, (a % b).to(a.dtype))
    tl.store(o + 5 * N + i, a & b)
    tl.store(o + 6 * N + i, a | b)
    tl.store(o + 7 * N + i, a ^ b)
    tl.store(o + 8 * N + i, a << 3)
    tl.store(o + 9 * N + i, a >> 2)
    tl.store(o + 10 * N + i, tl.maximum(a, b))
    tl.store(o + 11 * N + i, tl.minimum(a, b))
    tl.store(o + 12 * N + i, tl.abs(a))
    tl.store(o + 13 * N + i, tl.where(a < b, a, -b))
    tl.store(o + 14 * N + i, ((a == b) | (a != b) & (a >= b) | (a <= b) & ~(a > b)).to(a.dtype))
    tl.store(o + 15 * N + i, ~a)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int32,
        torch.int64,
        torch.uint8,
        pytest.param(torch.int8, marks=pytest.mark.nightly),
        pytest.param(torch.int16, marks=pytest.mark.nightly),
        pytest.param(torch.uint32, marks=pytest.mark.nightly),
    ],
)
def test_integers(dtype):
    torch.manual_seed(0)
    info = torch.iinfo(dtype)
    low = max(info.min, -(2**40))
    x = torch.randint(low, min(info.max, 2**40), (N,)).to(dtype)
    y = torch.randint(1, 100, (N,)).to(dtype)
    if info.min < 0:
        y = y * (torch.randint(0, 2, (N,)) * 2 - 1).to(dtype)
    y[:8] = x[:8].clamp_min(1) if info.min < 0 else x[:8] | 1
    out = torch.empty(16 * N, dtype=dtype, device="npu")
    integer_kernel[(1,)](x.to("npu"), y.to("npu"), out, N)
    # In 64 bits, and back: so integers wrap.
    a, b = x.long(), y.long()
    cut = [
        a + b, a - b, a * b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), a & b, a | b, a ^ b, a << 3, a >> 2,
        torch.maximum(a, b), torch.minimum(a, b), a.abs(), torch.where(a < b, a, -b),
        ((a == b) | (a > b) | (a < b)).long(), ~a,
    ]  # fmt: skip
    expected = torch.stack([each.to(dtype) for each in cut])
    torch.testing.assert_close(out.cpu().view(16, N), expected, rtol=0, atol=0)


@triton.jit
def float_kernel(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, a + b)
    tl.store(o + N + i, a - b)
    tl.store(o + 2 * N + i, a * b)
    tl.store(o + 3 * N + i, (a / b).to(a.dtype))
    tl.store(o + 4 * N + i, tl.maximum(a, b))
    tl.store(o + 5 * N + i, tl.minimum(a, b))
    tl.store(o + 6 * N + i, tl.where(a < b, a, -b))
    tl.store(o + 7 * N + i, tl.abs(a))
    tl.store(o + 8 * N + i, tl.clamp(a, -0.5, 0.5))
    tl.store(o + 9 * N + i, ((a == b) | (a > b) | (a <= b)).to(a.dtype))
    tl.store(o + 10 * N + i, tl.fma(a, b, a))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats(dtype):
    torch.manual_seed(0)
    x, y = torch.randn(N).to(dtype), torch.randn(N).to(dtype)
    y[:4] = x[:4]
    out = torch.empty(11 * N, dtype=dtype, device="npu")
    float_kernel[(1,)](x.to("npu"), y.to("npu"), out, N)
    expected = torch.stack([
        x + y, x - y, x * y, x / y, torch.maximum(x, y), torch.minimum(x, y), torch.where(x < y, x, -y), x.abs(),
        x.clamp(-0.5, 0.5), torch.ones_like(x), (x.double() * y.double() + x.double()).to(dtype),
    ])  # fmt: skip
    torch.testing.assert_close(out.cpu().view(11, N), expected)


@triton.jit
def nan_kernel(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, tl.maximum(a, b))
    tl.store(o + N + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + 2 * N + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + 3 * N + i, tl.clamp(a, b, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + 4 * N + i, (a != a).to(tl.float32))


def test_a_nan_yields_or_wins_as_it_is_asked_to():
    nan = float("nan")
    x, y = torch.tensor([nan, 1.0, nan, 2.0]), torch.tensor([0.0, nan, nan, 1.0])
    out = torch.empty(5 * 4, device="npu")
    nan_kernel[(1,)](x.to("npu"), y.to("npu"), out, 4)
    expected = torch.tensor([[0, 1, nan, 2], [nan, nan, nan, 2], [nan, nan, nan, 1], [nan, nan, nan, 1], [1, 0, 1, 0]])
    torch.testing.assert_close(out.cpu().view(5, 4), expected, equal_nan=True)


@triton.jit
def function_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(o + i, tl.exp(a))
    tl.store(o + N + i, tl.exp2(a))
    tl.store(o + 2 * N + i, tl.log(a))
    tl.store(o + 3 * N + i, tl.log2(a))
    tl.store(o + 4 * N + i, tl.sqrt(a))
    tl.store(o + 5 * N + i, tl.rsqrt(a))
    tl.store(o + 6 * N + i, tl.sin(a))
    tl.store(o + 7 * N + i, tl.cos(a))
    tl.store(o + 8 * N + i, tl.erf(a))
    tl.store(o + 9 * N + i, tl.floor(a))
    tl.store(o + 10 * N + i, tl.ceil(a))
    tl.store(o + 11 * N + i, tl.sigmoid(a))
    tl.store(o + 12 * N + i, libdevice.tanh(a))
    tl.store(o + 13 * N + i, libdevice.log1p(a))
    tl.store(o + 14 * N + i, libdevice.pow(a, a))
    tl.store(o + 15 * N + i, libdevice.atan2(a, a + 1))
    tl.store(o + 16 * N + i, libdevice.expm1(a))
    tl.store(o + 17 * N + i, libdevice.rint(a))
    tl.store(o + 18 * N + i, libdevice.cosh(a))
    tl.store(o + 19 * N + i, libdevice.lgamma(a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions(dtype):
    x = torch.rand(N, dtype=dtype) * 4 + 0.1
    out = torch.empty(20 * N, dtype=dtype, device="npu")
    function_kernel[(1,)](x.to("npu"), out, N)
    expected = torch.stack([
        x.exp(), x.exp2(), x.log(), x.log2(), x.sqrt(), x.rsqrt(), x.sin(), x.cos(), x.erf(), x.floor(), x.ceil(),
        x.sigmoid(), x.tanh(), x.log1p(), x**x, torch.atan2(x, x + 1), x.expm1(), x.round(), x.cosh(), torch.lgamma(x),
    ])  # fmt: skip
    torch.testing.assert_close(out.cpu().view(20, N), expected, rtol=2e-6, atol=2e-6)


@triton.jit
def bit_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(o + i, libdevice.clz(a))
    tl.store(o + N + i, libdevice.popc(a))
    tl.store(o + 2 * N + i, libdevice.brev(a))
    tl.store(o + 3 * N + i, libdevice.ffs(a))
    tl.store(
        o + 4 * N + i,
        tl.umulhi(a.to(tl.uint32, bitcast=True), a.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True),
    )


def test_bits():
    x = torch.randint(-(2**31), 2**31 - 1, (N,), dtype=torch.int32)
    x[:3] = torch.tensor([0, 1, -1])
    out = torch.empty(5 * N, dtype=torch.int32, device="npu")
    bit_kernel[(1,)](x.to("npu"), out, N)
    words = [value & 0xFFFFFFFF for value in x.tolist()]
    texts = [f"{word:032b}" for word in words]
    expected = [
        [32 - word.bit_length() for word in words],
        [word.bit_count() for word in words],
        [int(text[::-1], 2) for text in texts],
        [(word & -word).bit_length() for word in words],
        [word * word >> 32 for word in words],
    ]
    assert [[value & 0xFFFFFFFF for value in row] for row in out.view(5, N).tolist()] == expected


@triton.jit
def cast_kernel(x, h, b, d, i8, i32, i64, u8, e4, e5, back, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(h + i, a.to(tl.float16))
    tl.store(b + i, a.to(tl.bfloat16))
    tl.store(d + i, a.to(tl.float64))
    tl.store(i8 + i, a.to(tl.int8))
    tl.store(i32 + i, a.to(tl.int32))
    tl.store(i64 + i, a.to(tl.int64))
    tl.store(u8 + i, tl.abs(a).to(tl.uint8))
    tl.store(e4 + i, a.to(tl.float8e4nv))
    tl.store(e5 + i, a.to(tl.float8e5))
    tl.store(back + i, tl.load(h + i).to(tl.float32))
    tl.store(back + N + i, tl.load(b + i).to(tl.float32))
    tl.store(back + 2 * N + i, tl.load(d + i).to(tl.float32))
    tl.store(back + 3 * N + i, tl.load(i8 + i).to(tl.float32))
    tl.store(back + 4 * N + i, tl.load(u8 + i).to(tl.float32))
    tl.store(back + 5 * N + i, tl.load(e4 + i).to(tl.float32))
    tl.store(back + 6 * N + i, tl.load(e5 + i).to(tl.float32))
    tl.store(back + 7 * N + i, (a > 0).to(tl.float32))
    tl.store(back + 8 * N + i, tl.load(h + i).to(tl.bfloat16).to(tl.float32))


def test_conversions():
    x = torch.randn(N) * 20
    x[:4] = torch.tensor([0.0, 1e-3, -0.015, 100.0])
    types = [
        torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8,
        torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    outs = [torch.empty(N, dtype=dtype, device="npu") for dtype in types]
    back = torch.empty(9 * N, device="npu")
    cast_kernel[(1,)](x.to("npu"), *outs, back, N)
    expected = [x.abs().to(dtype) if dtype is torch.uint8 else x.to(dtype) for dtype in types]
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.cpu().float(), wanted.float(), rtol=0, atol=0)
    again = [expected[place].float() for place in (0, 1, 2, 3, 6, 7, 8)]
    again += [(x > 0).float(), x.half().bfloat16().float()]
    torch.testing.assert_close(back.cpu().view(9, N), torch.stack(again), rtol=0, atol=0)


@triton.jit
def wide_kernel(x, d, f, N: tl.constexpr, SIGNED: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i).to(tl.int64 if SIGNED else tl.uint64, bitcast=True)
    tl.store(d + i, a.to(tl.float64))
    tl.store(f + i, a.to(tl.float32))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_conversions_of_64_bits_round_once(dtype):
    generator = np.random.default_rng(0)
    ends = np.array([0, 2**63 - 1, -(2**63), -1], np.int64).view(np.uint64)
    # where a double, and from it a float, would round to even what is not half
    edges = [((1 << k) + (1 << max(k - 24, 0)) + near) % 2**64 for k in range(64) for near in (-1, 0, 1)]
    drawn = generator.integers(0, 2**64, 1024, np.uint64) >> generator.integers(0, 64, 1024, np.uint64)
    words = np.concatenate([ends, np.array(edges, np.uint64), drawn])
    numbers = np.resize(np.concatenate([words, ~words]), 4096).view(dtype)
    wide, narrow = (torch.empty(4096, dtype=dtype, device="npu") for dtype in (torch.float64, torch.float32))
    wide_kernel[(1,)](torch.from_numpy(numbers.view(np.int64)).to("npu"), wide, narrow, 4096, dtype is np.int64)
    np.testing.assert_array_equal(wide.cpu().numpy(), numbers.astype(np.float64))
    np.testing.assert_array_equal(narrow.cpu().numpy(), numbers.astype(np.float32))


@triton.jit
def half_kernel(codes, x, wide, narrow, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(wide + i, tl.load(codes + i).to(tl.float32))
    tl.store(narrow + i, tl.load(x + i).to(tl.float16))


def test_each_float16_and_what_rounds_to_it():
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    larger = torch.arange(1, 2**15 + 1).to(torch.int16).view(torch.float16)
    # between two neighbours the half of both rounds to even, what is next to it does not; from 65,520 on it is infinite
    halves = ((codes.double()[2**15 :] + larger.double()) / 2).float()
    near = [halves, *(torch.nextafter(halves, torch.tensor(end)) for end in (-torch.inf, torch.inf))]
    ends = torch.tensor([65519.996, 65520.0, 65536.0, 3.4e38, 1e-45, torch.inf, torch.nan])
    parts = [ends, -ends, codes.float(), *near, *(-part for part in near)]
    x, codes = torch.cat(parts)[: 2**18], codes.repeat(4)
    wide, narrow = torch.empty(2**18, device="npu"), torch.empty(2**18, dtype=torch.float16, device="npu")
    half_kernel[(2**8,)](codes.to("npu"), x.to("npu"), wide, narrow, 2**10)
    torch.testing.assert_close(wide.cpu(), codes.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow.cpu(), x.half(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(narrow.cpu().signbit() | x.isnan(), x.signbit() | x.isnan())


@triton.jit
def fp8_kernel(codes, wide, narrow, KIND: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(codes + i).to(KIND, bitcast=True).to(tl.float32)
    tl.store(wide + i, a)
    tl.store(narrow + i, a.to(KIND).to(tl.uint8, bitcast=True))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (tl.float8e4nv, torch.float8_e4m3fn),
        (tl.float8e5, torch.float8_e5m2),
        (tl.float8e4b8, torch.float8_e4m3fnuz),
        (tl.float8e5b16, torch.float8_e5m2fnuz),
    ],
)
def test_every_number_of_8_bits_there_and_back(kind, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    wide, narrow = torch.empty(256, device="npu"), torch.empty(256, dtype=torch.uint8, device="npu")
    fp8_kernel[(1,)](codes.to("npu"), wide, narrow, kind, 256)
    expected = codes.view(dtype).float()
    torch.testing.assert_close(wide.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    finite = expected.isfinite()
    assert torch.equal(narrow.cpu()[finite], codes[finite])
    assert narrow.cpu().view(dtype).float()[expected.isnan()].isnan().all()


@triton.jit
def random_kernel(o, p, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.rand(seed, i))
    tl.store(o + N + i, tl.randn(seed, i))
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(p + i, a ^ b ^ c ^ d)


def philox(seed: int, offset: int) -> list[int]:
    """Philox 4x32 with ten rounds (Salmon et al. 2011), as in Triton's language."""
    counter, key = [offset, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox():
    out, ints = torch.empty(2 * N, device="npu"), torch.empty(N, dtype=torch.int32, device="npu")
    random_kernel[(1,)](out, ints, 1234567, N)
    words = [philox(1234567, offset) for offset in range(N)]
    assert [value & 0xFFFFFFFF for value in ints.tolist()] == [a ^ b ^ c ^ d for a, b, c, d in words]
    signed = torch.tensor([word[0] for word in words]).int().double()
    uniform = torch.where(signed < 0, -signed - 1, signed) * 4.6566127342e-10
    torch.testing.assert_close(out.cpu()[:N], uniform.float())
    assert out.cpu()[N:].std().sub(1).abs() < 0.3


@triton.jit
def assembly_kernel(x, r, h, q, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    y = tl.inline_asm_elementwise(
        "{ cvt.rs.f16x2.f32 $0, $2, $1, $3; }",
        "=r,r,r,r,r",
        [a, tl.load(r + i)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    tl.store(h + i, y)
    z = tl.inline_asm_elementwise(
        "{ .reg .b8 tmp; cvt.rn.satfinite.e2m1x2.f32 tmp, $1, $2; cvt.u32.u8 $0, tmp; }",
        "=r,f,f", [a, -a], dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(q + i, z.to(tl.uint8))


def test_inline_assembly_that_the_table_knows():
    x = torch.tensor([0.2, 0.3, 1.25, 1.76, 2.5, 3.4, 5.0, 100.0])
    halves, packed = torch.empty(8, dtype=torch.float16, device="npu"), torch.empty(8, dtype=torch.uint8, device="npu")
    assembly_kernel[(1,)](x.to("npu"), torch.zeros(8, dtype=torch.int32, device="npu"), halves, packed, 8)
    below = x.half()
    below = torch.where(below.float() > x, torch.nextafter(below, torch.zeros_like(below)), below)
    assert torch.equal(halves.cpu(), below)  # no random bit is set, so that all are cut
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert numbers[(packed.cpu() >> 4).long()].tolist() == [0, 0.5, 1, 2, 2, 3, 4, 6]
    assert numbers[(packed.cpu() & 7).long()].tolist() == [0, 0.5, 1, 2, 2, 3, 4, 6]
    assert ((packed.cpu() & 8) == 8).all()


@triton.jit
def unknown_assembly_kernel(o):
    tl.store(o, tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [1], dtype=tl.int32, is_pure=True, pack=1))


def test_other_inline_assembly_is_refused_by_name():
    from npu_platform.errors import UnsupportedFeatureError

    with pytest.raises(UnsupportedFeatureError, match="bfind.u32"):
        unknown_assembly_kernel[(1,)](torch.empty(1, dtype=torch.int32, device="npu"))
