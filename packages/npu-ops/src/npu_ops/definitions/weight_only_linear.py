"""y = x w^T + b with weights of 4 or 8 bits (integers, MXFP4, MXFP8 or NVFP4), scaled in groups, and x as it is."""

from __future__ import annotations

from torch import Tensor

from npu_ops.op import define
from npu_ops.panels import dequantize


def _shape(
    x: Tensor, _weight: Tensor, _s: Tensor, _z: Tensor | None, _o: Tensor | None, _b: Tensor | None, n: int, _g: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@define(
    "weight_only_linear(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? order, Tensor? bias, "
    "int out_features, int group_size) -> Tensor",
    _shape,
)
def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
) -> Tensor:
    """x: [..., K] bfloat16, float16 or float32; returns [..., out_features] of that dtype.

    weight: `panels.pack`, uint8 [panels, ceil(K / 4), 64 (4 bits) or 128 (8 bits)].
    scales: `panels.pack_groups`, floating point [panels, groups, 32]; zeros: the same shape in int8, or None: 8 for
    4 bits, 0 for 8. Scales in uint8 are e8m0 (2^(scale - 127)) and make it MXFP4, where weight packs
    `panels.codes_of_e2m1`, or MXFP8, where it packs `panels.e4m3_codes` without NaN. Those of
    `panels.pack_scaled_groups`, float8_e4m3fn [panels, 4 + groups, 32], make it NVFP4, of MXFP4's codes.
    order: int32 [K], the element of x that the weights' i-th meets, or None; groups are those of the weights' order.
    It comes with the weights and is not looked at again: each must be below K.
    bias: [out_features] of x's dtype, or None.
    group_size: elements of K that share a scale: 4 to 128 dividing 128, a multiple of 128, or at least K; 32 in MXFP4
    and MXFP8, 16 in NVFP4.

    The native kernels take each block of x (a group, at most 128 elements) as 16-bit integers of one power of two, so
    that elements below 2^-8 of the block's largest lose bits that their share of the result has no room for (float32:
    31 bits). A block with an infinity or NaN makes its row NaN. On AVX512_BF16 rows of bfloat16 stay as they are. There
    and on AMX many of them meet weights that have been multiplied by their scales and rounded to bfloat16, which
    leaves those of MXFP4, MXFP8 and NVFP4 as they are (not in batch-invariant mode). Beside MXFP8 x is never rounded;
    its scales count as 2^-117 at least and as 2^119 at most, where codes become bfloat16.
    """
    k = x.shape[-1]
    w = dequantize(weight, scales, zeros, out_features, k, group_size)
    if order is not None:
        x = x[..., order.long()]
    y = x.float() @ w.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)
