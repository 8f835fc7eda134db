"""tl.dot over types and sizes, with carried pointers, and microscaled products, against torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(a, b, c, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    acc = tl.load(c + i[:, None] * N + j[None, :])
    r = tl.dot(x, y, acc, input_precision="ieee", out_dtype=OUT)
    tl.store(o + i[:, None] * N + j[None, :], r)
    # once more, with a result that is read afterwards, and transposed operands
    s = tl.dot(tl.trans(y), tl.trans(x), tl.trans(r), input_precision="ieee", out_dtype=OUT)
    tl.store(o + M * N + j[:, None] * M + i[None, :], s + tl.trans(r))


@pytest.mark.parametrize("size", [(16, 32, 16), (1, 16, 64), pytest.param((64, 16, 8), marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, tl.float32),
        (torch.bfloat16, tl.float32),
        (torch.float16, tl.float16),
        (torch.int8, tl.int32),
        (torch.float8_e5m2, tl.float32),
        pytest.param(torch.float64, tl.float64, marks=pytest.mark.nightly),
    ],
)
def test_products(dtype, out, size):
    m, n, k = size
    a, b = torch.randint(-3, 4, (m, k)).to(dtype), torch.randint(-3, 4, (k, n)).to(dtype)
    kind = {tl.float32: torch.float32, tl.float16: torch.float16, tl.int32: torch.int32, tl.float64: torch.float64}[out]
    c = torch.randint(-3, 4, (m, n)).to(kind)
    result = torch.empty(2 * m * n, dtype=kind, device="npu")
    product_kernel[(1,)](a.to("npu"), b.to("npu"), c.to("npu"), result, m, n, k, out)
    product = a.double() @ b.double()
    expected = torch.cat([(product + c.double()).flatten(), (3 * product + 2 * c.double()).T.flatten()])
    torch.testing.assert_close(result.cpu().double(), expected, rtol=0, atol=0)


@triton.jit
def batched_kernel(a, b, o, B: tl.constexpr, M: tl.constexpr):
    e, i, j = tl.arange(0, B)[:, None, None], tl.arange(0, M)[None, :, None], tl.arange(0, M)[None, None, :]
    at = (e * M + i) * M + j
    tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_products_of_batches():
    a, b = torch.randn(4, 16, 16), torch.randn(4, 16, 16)
    out = torch.empty(4, 16, 16, device="npu")
    batched_kernel[(1,)](a.to("npu"), b.to("npu"), out, 4, 16)
    torch.testing.assert_close(out.cpu(), a @ b, rtol=1e-5, atol=1e-5)


@triton.jit
def scaled_kernel(
    a,
    sa,
    b,
    sb,
    o,
    A: tl.constexpr,
    B: tl.constexpr,
    PACK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + i[:, None] * (K // PACK) + tl.arange(0, K // PACK)[None, :])
    y = tl.load(b + tl.arange(0, K)[:, None] * N + j[None, :])
    scale = tl.arange(0, K // 32)
    r = tl.dot_scaled(
        x,
        tl.load(sa + i[:, None] * (K // 32) + scale[None, :]),
        A,
        y,
        tl.load(sb + j[:, None] * (K // 32) + scale[None, :]),
        B,
    )
    tl.store(o + i[:, None] * N + j[None, :], r)


@pytest.mark.parametrize("form", ["e2m1", "e4m3"])
def test_microscaled_products(form):
    m, n, k = 16, 32, 64
    sa, sb = (
        torch.randint(125, 130, (m, k // 32), dtype=torch.uint8),
        torch.randint(125, 130, (n, k // 32), dtype=torch.uint8),
    )
    b = torch.randint(-3, 4, (k, n)).to(torch.float8_e4m3fn)
    if form == "e2m1":
        codes = torch.randint(0, 16, (m, k))
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        wide, a = numbers[codes], (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    else:
        a = torch.randint(-3, 4, (m, k)).to(torch.float8_e4m3fn)
        wide = a.float()
    out = torch.empty(m, n, device="npu")
    scaled_kernel[(1,)](
        a.to("npu"), sa.to("npu"), b.to("npu"), sb.to("npu"), out, form, "e4m3", 2 if form == "e2m1" else 1, m, n, k
    )
    left = wide * torch.exp2(sa.float() - 127).repeat_interleave(32, 1)
    right = b.float() * torch.exp2(sb.float() - 127).repeat_interleave(32, 1).T
    torch.testing.assert_close(out.cpu(), left @ right)
