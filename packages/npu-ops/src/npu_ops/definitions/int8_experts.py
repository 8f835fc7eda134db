"""Experts with weights of 8 bits, and x rounded to 8 bits by token."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.definitions.int8_linear import dynamic_int8_quant
from npu_ops.definitions.moe import experts_of
from npu_ops.op import define
from npu_ops.panels import COLUMNS, unpack


@define(
    "int8_experts(Tensor x, Tensor w13, Tensor scale13, Tensor w2, Tensor scale2, Tensor weights, Tensor ids, "
    "Tensor? bias13, Tensor? bias2, Tensor? expert_map, int width, str activation, float alpha, float beta, "
    "float limit, bool weigh_input) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def int8_experts(
    x: Tensor,
    w13: Tensor,
    scale13: Tensor,
    w2: Tensor,
    scale2: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    expert_map: Tensor | None,
    width: int,
    activation: str,
    alpha: float,
    beta: float,
    limit: float,
    weigh_input: bool,
) -> Tensor:
    """fused_experts with the weights of int8_linear, each with a leading dimension of experts.

    w13: gate panels and then up panels, each of `width` columns padded to whole panels; or of one, without a gate;
    scale13, scale2: float32 [experts, panels * 32]. x and the activated rows become int8 by their own ranges, as
    dynamic_int8_quant's symmetric. Biases: gates, then ups.
    """
    hidden, panels = x.shape[1], -(-width // COLUMNS)

    def matrix(w: Tensor, scale: Tensor, expert: int, first: int, n: int, k: int) -> Tensor:
        values = unpack(w[expert, first : first - (-n // COLUMNS)], n, k)
        return values * scale[expert, first * COLUMNS :][:n, None]

    def up(expert: int) -> Tensor:
        return torch.cat([matrix(w13, scale13, expert, i, width, hidden) for i in range(0, w13.shape[1], panels)])

    def down(expert: int) -> Tensor:
        return matrix(w2, scale2, expert, 0, hidden, width)

    def rounded(rows: Tensor, _: int) -> Tensor:
        q, scale, _ = dynamic_int8_quant.reference(rows, True)
        return q.to(rows.dtype) * scale

    gate = (activation, False, alpha, beta, limit, weigh_input)
    return experts_of(x, w13.shape[0], up, down, weights, ids, bias13, bias2, expert_map, gate, rounded)
