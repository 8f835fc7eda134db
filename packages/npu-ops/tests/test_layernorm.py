from __future__ import annotations

import pytest
import torch


def expected(x, weight, eps, *, rounded=True):
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (y.to(weight.dtype) if rounded else y).float() * weight.float()


@pytest.mark.parametrize("shape", [(1, 1024), (5, 100), (3, 7, 17), (64, 1), (0, 32)])
def test_rms_norm_equals_the_formula(ops, isa, device, dtype, close, shape):
    x, w = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(ops.rms_norm(x.to(device), w.to(device), 1e-5), expected(x, w, 1e-5), units=1.1)


def test_rms_norm_takes_heads_out_of_a_packed_projection(ops, isa, dtype, close):
    qkv, w = torch.randn(6, 10 * 32).to(dtype), torch.randn(32).to(dtype)
    q = qkv[:, 32 : 5 * 32].unflatten(-1, (4, 32))
    y = ops.rms_norm(q, w, 1e-6)
    assert y.is_contiguous()
    close(y, expected(q, w, 1e-6), units=1.1)


def test_rms_norm_takes_any_strides(ops, isa, close):
    x, w = torch.randn(3, 5, 7, 16).transpose(0, 2), torch.randn(16)
    close(ops.rms_norm(x, w, 1e-6), expected(x, w, 1e-6))
    close(
        ops.rms_norm(torch.randn(16, 3).t(), w, 1e-6), expected(torch.randn(0, 16), w, 1e-6).new_zeros(3, 16), floor=99
    )


def test_float_weight_is_not_rounded_first(ops, isa, close):
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(64)
    close(ops.rms_norm(x, w, 1e-6), expected(x, w, 1e-6, rounded=False))


def test_gemma_adds_one_to_the_weight(ops, isa, device, dtype, close):
    x, w = torch.randn(4, 72).to(dtype), torch.randn(72).to(dtype)
    y = ops.gemma_rms_norm(x.to(device), w.to(device), 1e-6)
    close(y, expected(x, w.float() + 1, 1e-6, rounded=False))


@pytest.mark.parametrize("op", ["fused_add_rms_norm", "fused_add_gemma_rms_norm"])
@pytest.mark.parametrize("shape", [(1, 1024), (5, 100), (2, 3, 40)])
def test_fused_add_norms_the_unrounded_sum(ops, isa, device, dtype, close, op, shape):
    x, residual, w = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y, r = x.to(device, copy=True), residual.to(device, copy=True)
    getattr(ops, op)(y, r, w.to(device), 1e-6)
    total = x.float() + residual.float()
    close(r, total.to(dtype), units=0)
    gemma = "gemma" in op
    close(y, expected(total, w.float() + 1 if gemma else w, 1e-6, rounded=not gemma), units=1.1)


def test_fused_add_refuses_what_it_cannot_write_in_place(ops):
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.fused_add_rms_norm(torch.randn(4, 8).t(), torch.randn(8, 4), torch.randn(4), 1e-6)


def test_weight_of_another_width_is_refused(ops):
    with pytest.raises(RuntimeError, match="weight must be contiguous"):
        ops.rms_norm(torch.randn(4, 8), torch.randn(9), 1e-6)


@pytest.mark.parametrize("shape", [(1, 1024), (5, 100), (3, 7, 17), (64, 1), (0, 32)])
def test_layer_norm_equals_torch(ops, isa, device, dtype, close, shape):
    x, w, b = (torch.randn(s).to(dtype) for s in (shape, shape[-1:], shape[-1:]))
    wide = torch.nn.functional.layer_norm
    y = ops.layer_norm(x.to(device), w.to(device), b.to(device), 1e-5, False)
    close(y, wide(x.double(), shape[-1:], w.double(), b.double(), 1e-5), units=1.1, floor=1e-5)


def test_layer_norm_with_less(ops, isa, close):
    x, w, b = torch.randn(6, 80).bfloat16()[:, 8:72] + 100, torch.randn(64), torch.randn(64)
    normed = torch.nn.functional.layer_norm(x.double(), (64,), None, None, 1e-6)
    close(ops.layer_norm(x, None, None, 1e-6, False), normed)
    close(ops.layer_norm(x, w, None, 1e-6, True), normed * (w.double() + 1))
    close(ops.layer_norm(x, None, b, 1e-6, False), normed + b)


def test_layer_norm_refuses_other_widths(ops):
    with pytest.raises(RuntimeError, match="bias must be contiguous"):
        ops.layer_norm(torch.randn(4, 8), torch.randn(8), torch.randn(9), 1e-6, False)


def test_a_nan_stays_one_whatever_its_bits(ops, isa):
    """In bfloat16 too, where rounding its lower half could carry out of it, or leave nothing of it."""
    bits = [0x7FFFFFFF, 0x7FFF8000, 0x7F800001, -1, -0x8000, -0x7FFFFF]
    weight = torch.tensor(bits, dtype=torch.int32).repeat(12).view(torch.float32)  # pairs of vectors, and a rest
    assert weight.isnan().all()
    assert ops.rms_norm(torch.ones(2, 72).bfloat16(), weight, 1e-6).isnan().all()
