"""y = x w^T + b with weights and x of 8 bits, and how x becomes 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define
from npu_ops.panels import unpack


def _quantized(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1].numel()
    zeros = x.new_empty((0 if symmetric else rows, 1), dtype=torch.int32)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((rows, 1), dtype=torch.float32), zeros


@define("dynamic_int8_quant(Tensor x, bool symmetric) -> (Tensor, Tensor, Tensor)", _quantized)
def dynamic_int8_quant(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each row of x [..., K] by its own range.

    Returns q int8 [..., K], scale float32 [rows, 1] and zero int32 [rows, 1] (empty when symmetric), so that
    x = (q - zero) * scale: the largest magnitude becomes 127, or the range (with 0 in it) -128 to 127. A row with a NaN
    has the scale NaN.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    if symmetric:
        scale = rows.abs().amax(-1, keepdim=True) / 127
        zero = scale.new_empty((0, 1), dtype=torch.int32)
        shift: Tensor | int = 0
    else:
        low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        finite = (scale > 0) & scale.isfinite()
        zero = torch.where(finite, -128 - low / scale, 0).round().int()  # 0 for scales that are NaN or infinite
        shift = zero
    q = _to_int8(rows, scale, shift)
    return q.view(x.shape), scale, zero


def _static(x: Tensor, _scale: Tensor, _zero: Tensor | None) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


@define("static_int8_quant(Tensor x, Tensor scale, Tensor? zero) -> Tensor", _static)
def static_int8_quant(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Quantise x by one given scale (float32 [1]) and zero (int32 [1] or None): int8 of x's shape, -128 for NaN."""
    return _to_int8(x.float(), scale, 0 if zero is None else zero)


def _to_int8(x: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
    inverse = torch.where(scale > 0, scale.reciprocal(), 0)
    return ((x * inverse).round() + zero).clamp(-128, 127).nan_to_num(-128).to(torch.int8)


def _shape(
    x: Tensor, _xs: Tensor, _xz: Tensor | None, _w: Tensor, _ws: Tensor, _sum: Tensor | None, _b: Tensor | None,
    n: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:-1], n, dtype=dtype)


@define(
    "int8_linear(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor weight, Tensor weight_scale, Tensor? weight_sum, "
    "Tensor? bias, int out_features, ScalarType dtype) -> Tensor",
    _shape,
)
def int8_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """x: int8 [..., K]; returns [..., out_features] of `dtype`: (x - x_zero) * x_scale times weight * weight_scale.

    x_scale: float32 [rows, 1] or [1]; x_zero: int32 of the same shape, or None (or empty).
    weight: `panels.pack` of int8 [N, K], uint8 [panels, ceil(K / 4), 128].
    weight_scale: float32, weight_sum: int32 (the sums along K, for x_zero only), each padded to [panels * 32].
    bias: [out_features] of `dtype`, or None.

    The sums are exact in 32 bits; only the scaling rounds.
    """
    rows = x.reshape(-1, x.shape[-1])
    w = unpack(weight, out_features, x.shape[-1])
    sums = rows.double() @ w.double().t()  # exact: below 2^53
    if x_zero is not None and x_zero.numel():
        assert weight_sum is not None
        sums = sums - x_zero.view(-1, 1).double() * weight_sum[:out_features].double()
    y = sums.float() * (weight_scale[:out_features] * x_scale.view(-1, 1))
    return (y if bias is None else y + bias.float()).to(dtype).view(*x.shape[:-1], out_features)


def _shape_of_dynamic(
    x: Tensor, _symmetric: bool, _w: Tensor, _ws: Tensor, _sum: Tensor | None, _b: Tensor | None, n: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@define(
    "int8_linear_dynamic(Tensor x, bool symmetric, Tensor weight, Tensor weight_scale, Tensor? weight_sum, "
    "Tensor? bias, int out_features) -> Tensor",
    _shape_of_dynamic,
)
def int8_linear_dynamic(
    x: Tensor,
    symmetric: bool,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """int8_linear of dynamic_int8_quant of x [..., K], which never leaves the cache; returns x's dtype.

    The other arguments are int8_linear's; weight_sum is read when not symmetric only.
    """
    q, scale, zero = dynamic_int8_quant.reference(x, symmetric)
    return int8_linear.reference(q, scale, zero, weight, weight_scale, weight_sum, bias, out_features, x.dtype)
