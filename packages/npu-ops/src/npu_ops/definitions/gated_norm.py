"""RMS norm beside a gate, as state-space layers end with."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


@define(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group, bool norm_first, bool sigmoid) "
    "-> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, norm_first: bool, sigmoid: bool
) -> Tensor:
    """norm(x) * weight * act(gate) if `norm_first`, else norm(x * act(gate)) * weight; in float32, rounded once.

    x, gate: [..., H]; weight: [H] of any float dtype; the mean of squares is over each `group` of H; act is SiLU or
    the sigmoid.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    opened = gate.to(wide).sigmoid() if sigmoid else torch.nn.functional.silu(gate.to(wide))
    y = x.to(wide) if norm_first else x.to(wide) * opened
    groups = y.unflatten(-1, (-1, group))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(wide)
    return (y * opened if norm_first else y).to(x.dtype)
