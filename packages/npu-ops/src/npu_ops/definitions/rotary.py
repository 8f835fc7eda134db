"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in place."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox: bool) -> None:
    """Rotate each head of x [tokens, heads * head_size] (or 3-D) in place; cos, sin: [tokens, half] float32."""
    heads = x if x.dim() == 3 else x.unflatten(-1, (-1, head_size))
    cos, sin, half = cos[:, None], sin[:, None], cos.shape[-1]
    part = heads[..., : 2 * half]
    a, b = (part[..., :half], part[..., half:]) if is_neox else (part[..., ::2], part[..., 1::2])
    a32, b32 = a.float(), b.float()
    first, second = a32 * cos - b32 * sin, b32 * cos + a32 * sin
    a.copy_(first)
    b.copy_(second)


@define(
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()"
)
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate query and key in place.

    positions: int64 [T]; query, key: [T, heads * head_size] or [T, heads, head_size]; cos_sin_cache: [positions,
    rotary_dim], cosines then sines, of any float dtype; rotary_dim <= head_size, the rest of a head passes. is_neox:
    pairs are (i, i + half), else (2i, 2i + 1). By a position outside of cos_sin_cache the native kernels rotate to NaN.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float().chunk(2, dim=-1)
    _rotate(query, cos, sin, head_size, is_neox)
    if key is not None:
        _rotate(key, cos, sin, head_size, is_neox)


@define(
    "multimodal_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int[] sections, bool interleaved) -> ()"
)
def multimodal_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    sections: list[int],
    interleaved: bool,
) -> None:
    """As rotary_embedding, with three positions a token (MRoPE, arXiv 2409.12191).

    positions: int64 [3, T] (time, height, width); sections: how many channels follow each, rotary_dim / 2 together,
    one after the other, or, interleaved, channel 3i + 1 the height and 3i + 2 the width as far as their sections go.
    """
    cos, sin = cos_sin_cache[positions].float().chunk(2, dim=-1)
    rows = _section_rows(cos.shape[-1], sections, interleaved, cos.device)
    index = rows.expand(1, cos.shape[1], -1)
    cos, sin = cos.gather(0, index)[0], sin.gather(0, index)[0]
    _rotate(query, cos, sin, head_size, is_neox)
    if key is not None:
        _rotate(key, cos, sin, head_size, is_neox)


def _section_rows(half: int, sections: list[int], interleaved: bool, device: torch.device) -> Tensor:
    """Which of the three positions each channel follows: int64 [half]."""
    channel = torch.arange(half, device=device)
    if not interleaved:
        return (channel >= sections[0]).long() + (channel >= sections[0] + sections[1]).long()
    height = (channel % 3 == 1) & (channel < 3 * sections[1])
    width = (channel % 3 == 2) & (channel < 3 * sections[2])
    return height.long() + 2 * width.long()
