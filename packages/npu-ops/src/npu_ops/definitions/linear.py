"""y = x w^T + b."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define


def _shape(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _shape)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., K], weight: [N, K] as stored, bias: [N] or None, all of one dtype. Returns [..., N]."""
    return F.linear(x, weight, bias)
