"""Activations, plain and gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define


def _half_width(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define("silu_and_mul(Tensor x) -> Tensor", _half_width)
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :d]) * x[..., d:] (SwiGLU, arXiv 2002.05202). x: [..., 2d]; returns [..., d]."""
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


@define("gelu_and_mul(Tensor x, bool tanh) -> Tensor", _half_width)
def gelu_and_mul(x: Tensor, tanh: bool) -> Tensor:
    """gelu(x[..., :d]) * x[..., d:], by erf or by its tanh approximation. x: [..., 2d]; returns [..., d]."""
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate="tanh" if tanh else "none") * x[..., d:]


@define("gelu(Tensor x, bool tanh) -> Tensor", _same)
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Gelu of x, by erf or by its tanh approximation (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh" if tanh else "none").contiguous()


@define("quick_gelu(Tensor x) -> Tensor", _same)
def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return (x * torch.sigmoid(1.702 * x)).contiguous()


@define("relu2(Tensor x) -> Tensor", _same)
def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv 2109.08668)."""
    return torch.square(F.relu(x)).contiguous()
