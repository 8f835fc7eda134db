"""Greedy choice, and the top-k and top-p masks."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


def _one_a_row(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@define("argmax(Tensor logits) -> Tensor", _one_a_row)
def argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of each row; a NaN counts as the highest. logits: [B, V]; returns int64 [B]."""
    width = logits.shape[-1]
    highest = logits.amax(dim=-1, keepdim=True)
    hit = (logits == highest) | (highest.isnan() & logits.isnan())
    return torch.where(hit, torch.arange(width, device=logits.device), width).amin(dim=-1)


@define("top_k_top_p(Tensor(a!) logits, Tensor? k, Tensor? p) -> ()")
def top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    """Set what lies outside the k highest and outside the nucleus of mass p to -inf, in place.

    logits: float32 [B, V]; k: int32 or int64 [B], 0 or V: all; p: float32 [B] in (0, 1]. The top-k mask comes first.
    Logits equal to
    the k-th stay. The nucleus keeps the highest logit, and of equals at its edge the last ones (Holtzman et al. 2020,
    arXiv 1904.09751; ties as vLLM's stable ascending sort leaves them).
    """
    ordered, index = logits.sort(dim=-1, stable=True)
    width = logits.shape[-1]
    if k is not None:
        kept = torch.where((k <= 0) | (k > width), width, k.long())
        bound = ordered.gather(1, (width - kept)[:, None])
        ordered = ordered.masked_fill(ordered < bound, float("-inf"))
    if p is not None:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        gone = (mass <= 1 - p[:, None]) & (p[:, None] < 1)
        gone[:, -1] = False
        ordered = ordered.masked_fill(gone, float("-inf"))
    logits.scatter_(-1, index, ordered)
