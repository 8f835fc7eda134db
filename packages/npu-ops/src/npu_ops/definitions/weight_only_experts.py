"""Experts with weights of 4 or 8 bits (integers, MXFP4, MXFP8 or NVFP4), scaled in groups, and x as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.definitions.moe import experts_of
from npu_ops.op import define
from npu_ops.panels import COLUMNS, dequantize


@define(
    "weight_only_experts(Tensor x, Tensor w13, Tensor scales13, Tensor? zeros13, Tensor w2, "
    "Tensor scales2, Tensor? zeros2, Tensor weights, Tensor ids, Tensor? bias13, Tensor? bias2, "
    "Tensor? expert_map, int width, int group_size, str activation, float alpha, float beta, float limit, "
    "bool weigh_input) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def weight_only_experts(
    x: Tensor,
    w13: Tensor,
    scales13: Tensor,
    zeros13: Tensor | None,
    w2: Tensor,
    scales2: Tensor,
    zeros2: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    expert_map: Tensor | None,
    width: int,
    group_size: int,
    activation: str,
    alpha: float,
    beta: float,
    limit: float,
    weigh_input: bool,
) -> Tensor:
    """fused_experts with the weights of weight_only_linear, each argument of that with a leading dimension of experts.

    w13: gate panels and then up panels, each of `width` columns padded to whole panels; or of one, without a gate;
    w2: panels of hidden columns. group_size is that of both. Biases: gates, then ups.
    """
    hidden, panels = x.shape[1], -(-width // COLUMNS)

    def matrix(w: Tensor, s: Tensor, z: Tensor | None, expert: int, first: int, n: int, k: int) -> Tensor:
        here = slice(first, first - (-n // COLUMNS))
        zeros = None if z is None else z[expert, here]
        return dequantize(w[expert, here], s[expert, here], zeros, n, k, group_size)

    def up(expert: int) -> Tensor:
        first = range(0, w13.shape[1], panels)
        return torch.cat([matrix(w13, scales13, zeros13, expert, i, width, hidden) for i in first])

    def down(expert: int) -> Tensor:
        return matrix(w2, scales2, zeros2, expert, 0, hidden, width)

    gate = (activation, False, alpha, beta, limit, weigh_input)
    return experts_of(x, w13.shape[0], up, down, weights, ids, bias13, bias2, expert_map, gate)
