"""Gates with numbers of their own: limits, thresholds, learned slopes.

Each takes the formula of vLLM's class of the same name (vllm/model_executor/layers/activation.py), in float32 and
rounded once. Gate and up are the halves of x's last dimension, or alternate where it says so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define


def _half_width(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define("mul_and_silu(Tensor x) -> Tensor", _half_width)
def mul_and_silu(x: Tensor) -> Tensor:
    """x[..., :d] * silu(x[..., d:]). x: [..., 2d]; returns [..., d]."""
    up, gate = x.float().chunk(2, dim=-1)
    return (up * F.silu(gate)).to(x.dtype)


@define("fatrelu_and_mul(Tensor x, float threshold) -> Tensor", _half_width)
def fatrelu_and_mul(x: Tensor, threshold: float) -> Tensor:
    """Gate where it is above the threshold, else 0, times up (MiniCPM-S). x: [..., 2d]; returns [..., d]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.threshold(gate, threshold, 0.0) * up).to(x.dtype)


@define("situ_and_mul(Tensor x, float beta, float linear_beta) -> Tensor", _half_width)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * up (Kimi); up is clipped likewise where linear_beta is above 0."""
    gate, up = x.float().chunk(2, dim=-1)
    if linear_beta > 0:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype)


@define("silu_and_mul_with_clamp(Tensor x, float limit, float alpha, float beta) -> Tensor", _half_width)
def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    """gate sigmoid(alpha gate) * (up + beta), gate at most limit and up within it. x: [..., 2d]; returns [..., d]."""
    gate, up = x.float().chunk(2, dim=-1)
    return _clamped(gate, up, limit, alpha, beta).to(x.dtype)


@define("swigluoai_and_mul(Tensor x, float alpha, float limit) -> Tensor", _half_width)
def swigluoai_and_mul(x: Tensor, alpha: float, limit: float) -> Tensor:
    """As silu_and_mul_with_clamp with beta 1, gate and up alternating (gpt-oss). x: [..., 2d]; returns [..., d]."""
    wide = x.float()
    return _clamped(wide[..., ::2], wide[..., 1::2], limit, alpha, 1.0).to(x.dtype)


@define("swiglustep_and_mul(Tensor x, float limit) -> Tensor", _half_width)
def swiglustep_and_mul(x: Tensor, limit: float) -> Tensor:
    """silu(gate) at most limit, times up within it (Step-3). x: [..., 2d]; returns [..., d]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(x.dtype)


@define("gelu_and_mul_sparse(Tensor x, float std_multiplier, bool tanh) -> Tensor", _half_width)
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, tanh: bool) -> Tensor:
    """gelu(relu(gate - cutoff)) * up (Gemma 3n): the cutoff is std_multiplier deviations above the row's mean gate."""
    gate, up = x.float().chunk(2, dim=-1)
    mean, deviation = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, unbiased=False)
    above = F.relu(gate - (mean + deviation * std_multiplier))
    return (F.gelu(above, approximate="tanh" if tanh else "none") * up).to(x.dtype)


@define("xielu(Tensor x, Tensor alpha_p, Tensor alpha_n, float beta, float eps) -> Tensor", _same)
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float) -> Tensor:
    """xIELU (arXiv 2411.13010; Apertus), elementwise. alpha_p, alpha_n: one element each, before softplus."""
    wide = x.float()
    positive, negative = F.softplus(alpha_p.float()), beta + F.softplus(alpha_n.float())
    below = (torch.expm1(wide.clamp(max=eps)) - wide) * negative
    y = torch.where(wide > 0, positive * wide * wide, below) + beta * wide
    return y.to(x.dtype).contiguous()


def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)
