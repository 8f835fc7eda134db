"""Mixture of experts: the choice of experts for each token, and the chosen experts' feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_ops.op import define

if TYPE_CHECKING:
    from collections.abc import Callable


def _chosen(logits: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@define(
    "select_experts(Tensor logits, int top_k, str scoring, bool renormalize, float scale, Tensor? bias, int groups, "
    "int top_groups) -> (Tensor weights, Tensor ids)",
    _chosen,
)
def select_experts(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    bias: Tensor | None,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token, the best first, of equals the first.

    logits: [T, E]; scoring: softmax or sigmoid; bias: [E], added to the scores for the choice only (DeepSeek-V3,
    arXiv 2412.19437). With groups, the experts come in so many groups of one size, and only the best top_groups take
    part: by their best score, with a bias by the sum of their two best; 0: no groups. The weights are the chosen
    scores, over their sum if renormalize, times scale. Returns float32 and int32 [T, top_k].
    """
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if groups:
        grouped = choice.unflatten(1, (groups, -1))
        ranks = grouped.amax(-1) if bias is None else grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1)
        best = ranks.sort(dim=-1, descending=True, stable=True)[1][:, :top_groups]
        gone = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, value=False)
        choice = grouped.masked_fill(gone[..., None], float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scale, ids.int()


_FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@define(
    "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, Tensor? bias13, Tensor? bias2, "
    "Tensor? expert_map, str activation, bool interleaved, float alpha, float beta, float limit, bool weigh_input) "
    "-> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    expert_map: Tensor | None,
    activation: str,
    interleaved: bool,
    alpha: float,
    beta: float,
    limit: float,
    weigh_input: bool,
) -> Tensor:
    """Sum over a token's experts of weight * down(activation(gate(x)) * up(x)).

    x: [T, H]; w13: [E, 2 I, H], gate rows then up rows, or in turn if interleaved; or [E, I, H]: no gate, the
    activation alone; w2: [E, H, I]; bias13, bias2: [E, rows]; all of one dtype. weights: float32 [T, K]; ids: int32 or
    int64 [T, K]; what lies outside of the experts is skipped. expert_map: int32 [global experts], which of these
    experts an id is, -1: none of them. activation: silu, gelu, gelu_tanh or relu2. alpha, beta, limit are silu's: with
    gate <= limit and -limit <= up <= limit, gate * sigmoid(alpha * gate) * (up + beta); 1, 0, inf for the plain one.
    weigh_input: the weights multiply x instead, and a token's ids must differ: the native kernels apply the gate to
    each pair, the reference to the sum of an expert's weights. Returns [T, H].
    """
    gate = (activation, interleaved, alpha, beta, limit, weigh_input)
    up, down = w13.__getitem__, w2.__getitem__
    return experts_of(x, w13.shape[0], up, down, weights, ids, bias13, bias2, expert_map, gate)


def experts_of(
    x: Tensor,
    experts: int,
    w13: Callable[[int], Tensor],
    w2: Callable[[int], Tensor],
    weights: Tensor,
    ids: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    expert_map: Tensor | None,
    gate: tuple[str, bool, float, float, float, bool],
    rounded: Callable[[Tensor, int], Tensor] = lambda rows, _: rows,
) -> Tensor:
    """As fused_experts, with an expert's weights from functions; `rounded(rows, 0 or 1)`: what the two layers see."""
    activation, interleaved, alpha, beta, limit, weigh_input = gate
    wide = torch.promote_types(x.dtype, torch.float32)
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map[torch.where(known, ids, 0).long()], -1)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(experts):
        here = ids == expert
        weight = (weights * here).sum(-1, keepdim=True)
        down = w2(expert).to(wide)
        inner = rounded(x.to(wide), 0) @ w13(expert).to(wide).t() * (weight if weigh_input else 1)
        if bias13 is not None:
            inner = inner + bias13[expert].to(wide)
        y = activated(inner, down.shape[1], activation, interleaved, alpha, beta, limit).to(x.dtype).to(wide)
        y = rounded(y, 1) @ down.t()
        if bias2 is not None:
            y = y + bias2[expert].to(wide)
        out += torch.where(here.any(-1, keepdim=True), y if weigh_input else y * weight, 0)
    return out.to(x.dtype)


def activated(
    inner: Tensor, width: int, activation: str, interleaved: bool, alpha: float, beta: float, limit: float
) -> Tensor:
    """Apply the gate of fused_experts. inner: [..., 2 width], or [..., width] without a gate; returns [..., width]."""
    gated = inner.shape[-1] == 2 * width
    if not gated:
        gate, up = inner, None
    elif interleaved:
        gate, up = inner[..., ::2], inner[..., 1::2]
    else:
        gate, up = inner.chunk(2, dim=-1)
    if activation == "silu":
        gate = gate.clamp(max=limit)
        gate = gate * torch.sigmoid(alpha * gate)
        up = None if up is None else up.clamp(-limit, limit) + beta
    else:
        gate = _FORMULAS[activation](gate)
    return gate if up is None else gate * up
