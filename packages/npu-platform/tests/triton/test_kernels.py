"""Kernels as people write them, each against torch: those of Triton's tutorials and of models, in our own words."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl


def check(out, expected, tolerance=1e-5):
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@triton.jit
def add_kernel(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(o + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


def test_vector_addition():
    x, y = torch.randn(9999), torch.randn(9999)
    out = torch.zeros(10000, device="npu")
    add_kernel[lambda meta: (triton.cdiv(9999, meta["B"]),)](x.to("npu"), y.to("npu"), out, 9999, B=256)
    check(out, torch.cat([x + y, torch.zeros(1)]))


@triton.jit
def softmax_kernel(x, o, columns, rows, B: tl.constexpr):
    j = tl.arange(0, B)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        a = tl.load(x + row * columns + j, mask=j < columns, other=-float("inf"))
        e = tl.exp(a - tl.max(a, 0))
        tl.store(o + row * columns + j, e / tl.sum(e, 0), mask=j < columns)


def test_softmax():
    x = torch.randn(33, 781)
    out = torch.empty(33, 781, device="npu")
    softmax_kernel[(4,)](x.to("npu"), out, 781, 33, B=1024)
    check(out, x.softmax(1))


@triton.jit
def layer_norm_kernel(x, w, b, o, n, eps, B: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([B], tl.float32)
    for begin in range(0, n, B):
        i = begin + tl.arange(0, B)
        total += tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / n
    squares = tl.zeros([B], tl.float32)
    for begin in range(0, n, B):
        i = begin + tl.arange(0, B)
        a = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
        squares += tl.where(i < n, (a - mean) * (a - mean), 0.0)
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / n + eps)
    for begin in range(0, n, B):
        i = begin + tl.arange(0, B)
        mask = i < n
        a = tl.load(x + row * n + i, mask=mask, other=0.0).to(tl.float32)
        tl.store(o + row * n + i, (a - mean) * scale * tl.load(w + i, mask=mask) + tl.load(b + i, mask=mask), mask=mask)


def test_layer_norm():
    x, w, b = torch.randn(5, 700).bfloat16(), torch.randn(700), torch.randn(700)
    out = torch.empty(5, 700, dtype=torch.bfloat16, device="npu")
    layer_norm_kernel[(5,)](x.to("npu"), w.to("npu"), b.to("npu"), out, 700, 1e-5, B=128)
    check(out, torch.nn.functional.layer_norm(x.float(), (700,), w, b), 2e-2)


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    pid = tl.program_id(0)
    across, down = tl.cdiv(N, BN), tl.cdiv(M, BM)
    first = pid // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    row, column = first + pid % (GROUP * across) % height, pid % (GROUP * across) // height
    i, j, k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa, pb = a + (i % M)[:, None] * sa + k[None, :], b + k[:, None] * sb + (j % N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        x = tl.load(pa, mask=k[None, :] < K - step * BK, other=0.0)
        y = tl.load(pb, mask=k[:, None] < K - step * BK, other=0.0)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        pa += BK
        pb += BK * sb
    tl.store(c + i[:, None] * sc + j[None, :], acc, mask=(i[:, None] < M) & (j[None, :] < N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_product(dtype):
    a, b = torch.randn(70, 100).to(dtype), torch.randn(100, 90).to(dtype)
    out = torch.empty(70, 90, device="npu")
    matmul_kernel[(3 * 3,)](
        a.to("npu"), b.to("npu"), out, 70, 90, 100, 100, 90, 90, BM=32, BN=32, BK=32, GROUP=2
    )  # fmt: skip
    check(out, a.double() @ b.double(), 1e-4)


@triton.jit
def attention_kernel(q, k, v, o, n, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    base = tl.program_id(1) * n * D
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + base + i[:, None] * D + d[None, :], mask=i[:, None] < n, other=0.0)
    best, total = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = min(n, (tl.program_id(0) + 1) * BM) if CAUSAL else n
    for begin in range(0, end, BN):
        j = begin + tl.arange(0, BN)
        key = tl.load(k + base + j[None, :] * D + d[:, None], mask=j[None, :] < n, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        seen = j[None, :] < n
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        score = tl.where(seen, score, -1e30)
        higher = tl.maximum(best, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        kept = tl.exp(best - higher)
        total = total * kept + tl.sum(p, 1)
        value = tl.load(v + base + j[:, None] * D + d[None, :], mask=j[:, None] < n, other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
        best = higher
    tl.store(o + base + i[:, None] * D + d[None, :], acc / total[:, None], mask=i[:, None] < n)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention(causal):
    q, k, v = torch.randn(3, 2, 3, 50, 32).unbind(0)
    out = torch.empty(2, 3, 50, 32, device="npu")
    attention_kernel[(4, 6)](q.to("npu"), k.to("npu"), v.to("npu"), out, 50, 32**-0.5, 32, 16, 16, causal)
    check(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), 1e-4)


@triton.jit
def dropout_kernel(x, o, n, p, seed, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    keep = tl.rand(seed, i) > p
    tl.store(o + i, tl.where(keep, tl.load(x + i, mask=mask) / (1 - p), 0.0), mask=mask)


def test_seeded_dropout():
    x = torch.randn(10000)
    first, second, third = (torch.empty(10000, device="npu") for _ in range(3))
    for out, seed in ((first, 1), (second, 1), (third, 2)):
        dropout_kernel[(10,)](x.to("npu"), out, 10000, 0.3, seed, B=1024)
    assert torch.equal(first.cpu(), second.cpu())
    assert not torch.equal(first.cpu(), third.cpu())
    kept = first.cpu() != 0
    assert 0.67 < kept.float().mean() < 0.73
    check(first.cpu()[kept], x[kept] / 0.7)


@triton.jit
def rope_kernel(x, cos, sin, H: tl.constexpr, D: tl.constexpr):
    token = tl.program_id(0)
    h, d = tl.arange(0, H)[:, None], tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos + token * (D // 2) + d), tl.load(sin + token * (D // 2) + d)
    at = x + token * H * D + h * D + d
    a, b = tl.load(at), tl.load(at + D // 2)
    tl.store(at, a * c - b * s)
    tl.store(at + D // 2, b * c + a * s)


def test_rotary_embedding_in_place():
    x, angle = torch.randn(7, 4, 32), torch.randn(7, 16)
    out = x.to("npu")
    rope_kernel[(7,)](out, angle.cos().to("npu"), angle.sin().to("npu"), 4, 32)
    a, b = x.chunk(2, -1)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    check(out, torch.cat([a * c - b * s, b * c + a * s], -1))


@triton.jit
def cross_entropy_kernel(logits, labels, loss, V, B: tl.constexpr):
    row = tl.program_id(0)
    best, total = -float("inf"), 0.0
    for begin in range(0, V, B):
        i = begin + tl.arange(0, B)
        a = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(best, tl.max(a, 0))
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(a - higher), 0)
        best = higher
    label = tl.load(labels + row)
    tl.store(loss + row, tl.log(total) + best - tl.load(logits + row * V + label).to(tl.float32))


def test_cross_entropy():
    logits, labels = torch.randn(6, 1000), torch.randint(0, 1000, (6,))
    out = torch.empty(6, device="npu")
    cross_entropy_kernel[(6,)](logits.to("npu"), labels.to("npu"), out, 1000, B=256)
    check(out, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))


@triton.jit
def delta_rule_kernel(q, k, v, g, beta, o, T, K: tl.constexpr, V: tl.constexpr):
    i, j = tl.arange(0, K), tl.arange(0, V)
    state = tl.zeros((K, V), tl.float32)
    for t in range(T):
        query, key = tl.load(q + t * K + i), tl.load(k + t * K + i)
        state *= tl.exp(tl.load(g + t))
        delta = (tl.load(v + t * V + j) - tl.sum(state * key[:, None], 0)) * tl.load(beta + t)
        state += key[:, None] * delta[None, :]
        tl.store(o + t * V + j, tl.sum(state * query[:, None], 0))


def test_gated_delta_rule():
    steps, size = 12, 32
    q, k, v = torch.randn(3, steps, size).unbind(0)
    k, g, beta = torch.nn.functional.normalize(k, dim=-1), -torch.rand(steps), torch.rand(steps)
    out = torch.empty(steps, size, device="npu")
    delta_rule_kernel[(1,)](*(each.to("npu") for each in (q, k, v, g, beta)), out, steps, size, size)
    state, rows = torch.zeros(size, size), []
    for t in range(steps):
        state = state * g[t].exp()
        state = state + torch.outer(k[t], (v[t] - k[t] @ state) * beta[t])
        rows.append(q[t] @ state)
    check(out, torch.stack(rows), 1e-4)


@triton.jit
def top_k_kernel(x, o, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    tl.store(o + row * K + tl.arange(0, K), tl.topk(tl.load(x + row * N + tl.arange(0, N)), K))


def test_top_k():
    x = torch.randn(3, 64)
    out = torch.empty(3, 8, device="npu")
    top_k_kernel[(3,)](x.to("npu"), out, 64, 8)
    check(out, x.topk(8).values)


@triton.jit
def quantise_kernel(x, o, scales, n, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    a = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(a), 0) / 448.0
    tl.store(scales + row, scale)
    tl.store(o + row * n + i, (a / scale).to(tl.float8e4nv), mask=i < n)


def test_quantisation_to_fp8():
    x = torch.randn(5, 100).bfloat16()
    out = torch.empty(5, 100, dtype=torch.float8_e4m3fn, device="npu")
    scales = torch.empty(5, device="npu")
    quantise_kernel[(5,)](x.to("npu"), out, scales, 100, B=128)
    expected = x.float().abs().amax(1) / 448
    check(scales, expected)
    check(out, (x.float() / expected[:, None]).to(torch.float8_e4m3fn), 0.07)


@triton.autotune([triton.Config({"B": 64}), triton.Config({"B": 128})], key=["n"], reset_to_zero=["count"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % 2 == 0})
@triton.jit
def tuned_kernel(o, count, n, B: tl.constexpr, EVEN: tl.constexpr):
    tl.atomic_add(count, 1)
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, i * 0 + B + EVEN, mask=i < n)


def test_an_autotuner_takes_its_first_configuration_unless_results_are_kept(monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)  # vLLM sets it when it is imported
    out, count = torch.empty(100, dtype=torch.int32, device="npu"), torch.zeros(1, dtype=torch.int32, device="npu")
    tuned_kernel[lambda meta: (triton.cdiv(100, meta["B"]),)](out, count, 100)
    assert out.unique().tolist() == [65]
    assert count.item() == 2  # no run but the one
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "1")
    driver = triton.runtime.driver.active
    monkeypatch.setitem(sys.modules, "vllm", sys)
    assert driver.get_benchmarker() is not triton.testing.do_bench
    monkeypatch.delitem(sys.modules, "vllm")
    assert driver.get_benchmarker() is triton.testing.do_bench
