"""Linear layers that do what comes next before their result is in memory, in float32, rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define


def _half_of_the_rows(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


@define("linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _half_of_the_rows)
def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), where x w^T + b holds the gates, then the ups.

    x: [..., K], weight: [2 I, K] as stored, bias: [2 I] or None, all of one dtype. Returns [..., I].
    """
    gate, up = _product(x, weight, bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@define("linear_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias) -> ()")
def linear_add_(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """residual += x w^T + b.

    residual: [..., N], its rows contiguous and a stride apart, in place; x: [..., K], none of residual's memory;
    weight: [N, K] as stored, bias: [N] or None, all of one dtype.
    """
    product = _product(x, weight, bias)
    residual.copy_(residual.to(product.dtype) + product)
