"""Kernels as Triton's tutorials have them, in our own words, for the benchmark of Triton on npu."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, o, n, B: tl.constexpr):
    """Add two vectors."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def scale_kernel(x, o, n, B: tl.constexpr):
    """Double a vector."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def sum_kernel(a, b, c, d, e, f, g, o, n, first, second, factor, B: tl.constexpr):
    """Add seven vectors, two of them with steps, and scale the sum: thirteen arguments."""
    i = tl.arange(0, B)
    mask = i < n
    total = tl.load(a + i * first, mask=mask) + tl.load(b + i * second, mask=mask) + tl.load(c + i, mask=mask)
    total += (
        tl.load(d + i, mask=mask) + tl.load(e + i, mask=mask) + tl.load(f + i, mask=mask) + tl.load(g + i, mask=mask)
    )
    tl.store(o + i, total * factor, mask=mask)


@triton.jit
def softmax_kernel(x, o, columns, B: tl.constexpr):
    """Apply softmax to a row of at most B columns."""
    i = tl.arange(0, B)
    row = tl.program_id(0) * columns
    a = tl.load(x + row + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(a - tl.max(a, 0))
    tl.store(o + row + i, e / tl.sum(e, 0), mask=i < columns)


@triton.jit
def matmul_kernel(a, b, c, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply a [M, K] and b [K, N] into c [M, N] of float32; all sizes are multiples of the blocks."""
    i, j, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    left, right = a + i[:, None] * K + k[None, :], b + k[:, None] * N + j[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(left), tl.load(right), acc, input_precision="ieee")
        left += BK
        right += BK * N
    tl.store(c + i[:, None] * N + j[None, :], acc)


@triton.jit
def layer_norm_kernel(x, w, b, o, columns, eps, B: tl.constexpr):
    """Normalise a row by its mean and variance, scale and shift it."""
    i = tl.arange(0, B)
    mask, row = i < columns, tl.program_id(0) * columns
    a = tl.load(x + row + i, mask=mask, other=0.0)
    centred = tl.where(mask, a - tl.sum(a, 0) / columns, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(o + row + i, normal * tl.load(w + i, mask=mask) + tl.load(b + i, mask=mask), mask=mask)


@triton.jit
def rms_norm_kernel(x, w, o, columns, eps, B: tl.constexpr):
    """Normalise a row by its root mean square, and scale it."""
    i = tl.arange(0, B)
    mask, row = i < columns, tl.program_id(0) * columns
    a = tl.load(x + row + i, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(a * a, 0) / columns + eps)
    tl.store(o + row + i, a * scale * tl.load(w + i, mask=mask), mask=mask)


@triton.jit
def dropout_kernel(x, o, n, p, seed, B: tl.constexpr):
    """Leave elements out with probability p, drawn by Philox from seed and place."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < n)
    tl.store(o + i, tl.where(tl.rand(seed, i) > p, a / (1 - p), 0.0), mask=i < n)


@triton.jit
def attention_kernel(q, k, v, o, T, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Attend from BM queries of a head to all keys before them, with a running maximum and sum."""
    d, first = tl.arange(0, D), tl.program_id(0) * BM
    head = tl.program_id(1) * T * D
    i = first + tl.arange(0, BM)
    query = tl.load(q + head + i[:, None] * D + d[None, :])
    best, total = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for begin in range(0, first + BM, BN):
        j = begin + tl.arange(0, BN)
        scores = tl.dot(query, tl.load(k + head + j[None, :] * D + d[:, None])) * scale
        scores = tl.where(i[:, None] >= j[None, :], scores, -float("inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        weights, fade = tl.exp(scores - new[:, None]), tl.exp(best - new)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(v + head + j[:, None] * D + d[None, :])
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None])
        best = new
    tl.store(o + head + i[:, None] * D + d[None, :], acc / total[:, None])
