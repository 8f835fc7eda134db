"""y = x w^T + b with weights in 8-bit floats, and x as it is or rounded to 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define
from npu_ops.panels import COLUMNS, unpack_bytes

_MAX = 448.0
_PACKED = 3  # dimensions
_SMALLEST_SCALE = 1 / (_MAX * 512)


def _shape(
    x: Tensor, weight: Tensor, _s: Tensor, _b: Tensor | None, _xs: Tensor | None, _g: int, _n: int, _k: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] * (COLUMNS if weight.dim() == _PACKED else 1))


@define(
    "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? x_scale, int x_group, "
    "int block_n, int block_k) -> Tensor",
    _shape,
)
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    x_group: int,
    block_n: int,
    block_k: int,
) -> Tensor:
    """x: [..., K] bfloat16, float16 or float32, finite; returns [..., N] of that dtype.

    weight: float8_e4m3fn (or its bits as uint8) [N, K] as stored, without NaN; weight_scale: float32, one for each
    block of block_n rows by block_k elements, in row order. A block holds whole rows, or a multiple of 32 both ways.
    Or the same packed by npu_ops.panels: [N / 32, ceil(K / 4), 128], which AVX512_BF16 reads faster beside rows of
    bfloat16; block_k and x_group are then multiples of 4 that divide 128, multiples of 128, or hold whole rows.
    bias: [N] of x's dtype, or None.
    x_scale: float32 [1]: x is rounded to e4m3 by this scale. Without it, x_group: 0 takes x as it is, otherwise each
    group of x_group elements of a row is rounded by its own range (K: by token).
    """
    if weight.dim() == _PACKED:
        weight = unpack_bytes(weight, len(weight) * COLUMNS, x.shape[-1])
    y = rounded_to_fp8(x.float(), x_scale, x_group) @ dequantized(weight, weight_scale, block_n, block_k).t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def dequantized(weight: Tensor, scale: Tensor, block_n: int, block_k: int) -> Tensor:
    """Return the weights as float32."""
    n, k = weight.shape
    rows, columns = (torch.arange(size, device=weight.device) // block for size, block in ((n, block_n), (k, block_k)))
    return weight.view(torch.float8_e4m3fn).float() * scale.view(int(rows[-1:].sum()) + 1, -1)[rows[:, None], columns]


def rounded_to_fp8(x: Tensor, scale: Tensor | None, group: int) -> Tensor:
    """Return x, float32, as fp8_linear takes it."""
    if scale is not None:
        return (x * scale.reciprocal()).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).float() * scale
    if group == 0:
        return x
    k = x.shape[-1]
    parts = torch.nn.functional.pad(x, (0, -k % group)).unflatten(-1, (-1, group))
    scale = (parts.abs().amax(-1, keepdim=True) / _MAX).clamp(min=_SMALLEST_SCALE)
    return ((parts * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., :k]
