"""Norms: RMS (Zhang and Sennrich 2019, arXiv 1910.07467), y = x / sqrt(mean(x^2) + eps) * w; layer (1607.06450)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


def normed(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x is float32; the product with the weight is taken in the weight's dtype, as vLLM does."""
    y = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (y.to(weight.dtype) * weight).to(dtype)


def _empty_like_contiguous(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _empty_like_contiguous)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension.

    x: [..., H], weight: [H], of one or of different float dtypes. Returns x's shape, contiguous.
    """
    return normed(x.float(), weight, eps, x.dtype).contiguous()


@define("fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x; x = rms_norm(residual), normed before the sum is rounded. Both [..., H] contiguous, in place."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(normed(total, weight, eps, x.dtype))


@define("gemma_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _empty_like_contiguous)
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm with weight + 1, the product in float32. Shapes as rms_norm."""
    return normed(x.float(), weight.float() + 1.0, eps, x.dtype).contiguous()


@define("fused_add_gemma_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
def fused_add_gemma_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """As fused_add_rms_norm, with weight + 1 and the product in float32."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(normed(total, weight.float() + 1.0, eps, x.dtype))


@define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool plus_one) -> Tensor", _empty_like_contiguous
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32.

    x: [..., H]; weight, bias: [H] of one dtype; plus_one: the weight is stored less one (Nemotron).
    """
    wide = None if weight is None else weight.float() + float(plus_one)
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], wide, None if bias is None else bias.float(), eps)
    return y.to(x.dtype).contiguous()
