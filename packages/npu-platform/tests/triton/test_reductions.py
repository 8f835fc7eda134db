"""Reductions, scans and counts, along each axis and over types, against torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def reduction_kernel(x, o, p, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, A)[:, None, None] * (B * C) + tl.arange(0, B)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    a = tl.load(x + at)
    k = tl.arange(0, K)
    tl.store(o + k, tl.reshape(tl.sum(a, AXIS), (K,)))
    tl.store(o + K + k, tl.reshape(tl.max(a, AXIS), (K,)))
    tl.store(o + 2 * K + k, tl.reshape(tl.min(a, AXIS), (K,)))
    tl.store(p + k, tl.reshape(tl.argmax(a, AXIS), (K,)))
    tl.store(p + K + k, tl.reshape(tl.argmin(a, AXIS), (K,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 2, 256), pytest.param((16, 8, 1), marks=pytest.mark.nightly)])
def test_reductions(dtype, axis, shape):
    torch.manual_seed(0)
    x = torch.randint(-50, 50, shape).to(dtype)
    size = x.numel() // shape[axis]
    out, places = torch.empty(3, size, dtype=dtype, device="npu"), torch.empty(2, size, dtype=torch.int32, device="npu")
    reduction_kernel[(1,)](x.to("npu"), out, places, *shape, axis, size)
    expected = torch.stack([x.float().sum(axis).to(dtype).flatten(), x.amax(axis).flatten(), x.amin(axis).flatten()])
    rounded = 4 if dtype is torch.bfloat16 else 0  # of sums that went through some hundreds
    torch.testing.assert_close(out.cpu()[0], expected[0], rtol=0, atol=rounded)
    assert torch.equal(out.cpu()[1:], expected[1:])
    moved = x.movedim(axis, 0).reshape(shape[axis], size)
    first = [
        [column.tolist().index(best) for column, best in zip(moved.T, row.tolist(), strict=True)]
        for row in expected[1:]
    ]
    assert places.tolist() == first  # ties go to the smaller index


@triton.jit
def xor(a, b):
    return a ^ b


@triton.jit
def linear(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scan_kernel(x, y, o, q, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(o + at, tl.cumsum(a, 0))
    tl.store(o + M * N + at, tl.cumsum(a, 1, reverse=True))
    tl.store(o + 2 * M * N + at, tl.cumprod(a, 1))
    _, states = tl.associative_scan((a, b), 1, linear)
    tl.store(o + 3 * M * N + at, states)
    tl.store(q + tl.arange(0, N), tl.reduce((a * 8).to(tl.int32), 0, xor))


def test_scans_and_reductions_with_a_function():
    x, y = torch.rand(8, 16), torch.randn(8, 16)
    out, ints = torch.empty(4, 8, 16, device="npu"), torch.empty(16, dtype=torch.int32, device="npu")
    scan_kernel[(1,)](x.to("npu"), y.to("npu"), out, ints, 8, 16)
    state, states = torch.zeros(8), []
    for step in range(16):
        state = x[:, step] * state + y[:, step]
        states.append(state)
    expected = torch.stack([x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.cumprod(1), torch.stack(states, 1)])
    torch.testing.assert_close(out.cpu(), expected)
    word = torch.zeros(16, dtype=torch.int32)
    for row in (x * 8).int():
        word ^= row
    assert torch.equal(ints.cpu(), word)


@triton.jit
def count_kernel(x, o, n, B: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + tl.arange(0, BINS), tl.histogram(tl.load(x + i), BINS))
    tl.store(o + BINS + tl.arange(0, BINS), tl.histogram(tl.load(x + i), BINS, mask=i < n))


def test_histogram():
    x = torch.randint(0, 16, (128,), dtype=torch.int32)
    out = torch.empty(2, 16, dtype=torch.int32, device="npu")
    count_kernel[(1,)](x.to("npu"), out, 100, 128, 16)
    assert out.tolist() == [x.bincount(minlength=16).tolist(), x[:100].bincount(minlength=16).tolist()]


@triton.jit
def pair(a, b):
    if a > b:
        c = a
    else:
        c = b * 2
    return c, a - b


@triton.jit
def map_kernel(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    c, d = tl.map_elementwise(pair, tl.load(x + i), tl.load(y + i))
    tl.store(o + i, c)
    tl.store(o + N + i, d)


@pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="Triton 3.5 has no map_elementwise")
def test_a_function_of_elements():
    x, y = torch.randn(32), torch.randn(32)
    out = torch.empty(2, 32, device="npu")
    map_kernel[(1,)](x.to("npu"), y.to("npu"), out, 32)
    torch.testing.assert_close(out.cpu(), torch.stack([torch.where(x > y, x, y * 2), x - y]))
