"""Experts with weights in 8-bit floats, and x as it is or rounded to 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.definitions.fp8_linear import dequantized, rounded_to_fp8
from npu_ops.definitions.moe import experts_of
from npu_ops.op import define
from npu_ops.panels import COLUMNS, unpack_bytes

_PACKED = 4  # dimensions


@define(
    "fp8_experts(Tensor x, Tensor w13, Tensor scale13, Tensor w2, Tensor scale2, Tensor weights, Tensor ids, "
    "Tensor? bias13, Tensor? bias2, Tensor? expert_map, Tensor? x_scale13, Tensor? x_scale2, int x_group, "
    "int block_n, int block_k, str activation, float alpha, float beta, float limit, bool weigh_input) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
def fp8_experts(
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
    x_scale13: Tensor | None,
    x_scale2: Tensor | None,
    x_group: int,
    block_n: int,
    block_k: int,
    activation: str,
    alpha: float,
    beta: float,
    limit: float,
    weigh_input: bool,
) -> Tensor:
    """fused_experts with the weights of fp8_linear, each with a leading dimension of experts.

    w13: float8_e4m3fn [E, 2 I, H], gate rows then up rows, or [E, I, H]; w2: [E, H, I]. scale13, scale2: float32, one
    for each block of block_n rows by block_k elements, gate and up apart. x_scale13, x_scale2: float32 [1], by which x
    and the activated rows are rounded; without them x_group: 0 takes them as they are, -1 rounds by token, else each
    group of so many elements. Or w13 and w2 packed as fp8_linear takes weights, gates and ups in panels of their own:
    [E, panels, H / 4, 128] and [E, panels, I / 4, 128].
    """
    if w2.dim() == _PACKED:
        w13, w2 = _as_rows(w13, w2, x.shape[1])
    width, experts = w2.shape[2], w13.shape[0]

    def up(expert: int) -> Tensor:
        parts = w13[expert].split(width)
        scales = scale13.reshape(experts, len(parts), -1)[expert]
        return torch.cat([dequantized(w, s, block_n, block_k) for w, s in zip(parts, scales, strict=True)])

    def down(expert: int) -> Tensor:
        return dequantized(w2[expert], scale2.reshape(experts, -1)[expert], block_n, block_k)

    def rounded(rows: Tensor, layer: int) -> Tensor:
        return rounded_to_fp8(rows, x_scale2 if layer else x_scale13, rows.shape[1] if x_group < 0 else x_group)

    gate = (activation, False, alpha, beta, limit, weigh_input)
    return experts_of(x, experts, up, down, weights, ids, bias13, bias2, expert_map, gate, rounded)


def _as_rows(w13: Tensor, w2: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    width = 4 * w2.shape[2]
    parts = w13.chunk(w13.shape[1] // -(-width // COLUMNS), dim=1)
    up = [torch.cat([unpack_bytes(part, width, hidden) for part in expert]) for expert in zip(*parts, strict=True)]
    return torch.stack(up), torch.stack([unpack_bytes(expert, hidden, width) for expert in w2])
