"""RMS norm whose result goes straight into 8 bits, as the next layer takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.definitions.cache import largest_code
from npu_ops.definitions.int8_linear import dynamic_int8_quant, static_int8_quant
from npu_ops.definitions.layernorm import normed
from npu_ops.op import define

_LEAST_SCALE = 1 / (448 * 512)


def _added(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    total = x.float()
    if residual is not None:
        total = total + residual.float()
        residual.copy_(total)
    return normed(total, weight, eps, x.dtype)


def _dynamic(
    x: Tensor, _residual: Tensor | None, _weight: Tensor, _eps: float, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1].numel()
    zeros = x.new_empty((0 if symmetric else rows, 1), dtype=torch.int32)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32), zeros


@define(
    "rms_norm_dynamic_quant(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, bool symmetric, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _dynamic,
)
def rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm x [..., H], or residual += x with a residual (contiguous, written), and quantise each row by its range.

    dtype: torch.int8, where codes, scale and zero are what dynamic_int8_quant gives for rms_norm's result; or
    torch.float8_e4m3fn, symmetric: scale is the largest magnitude over 448, 1 / (448 * 512) at least, or NaN.
    Returns codes [..., H], scale float32 [rows, 1] and zero int32 [rows, 1] (empty when symmetric).
    """
    y = _added(x, residual, weight, eps)
    if dtype == torch.int8:
        return dynamic_int8_quant.reference(y, symmetric)
    rows = y.reshape(-1, y.shape[-1]).float()
    scale = (rows.abs().amax(-1, keepdim=True) / largest_code(dtype)).clamp(min=_LEAST_SCALE)
    return _codes(rows, scale, dtype).view(x.shape), scale, scale.new_empty((0, 1), dtype=torch.int32)


def _static(
    x: Tensor, _residual: Tensor | None, _weight: Tensor, _eps: float, _scale: Tensor, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@define(
    "rms_norm_static_quant(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, Tensor scale, "
    "ScalarType dtype) -> Tensor",
    _static,
)
def rms_norm_static_quant(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """As rms_norm_dynamic_quant, by one given scale (float32 [1]), without zero points: codes of x's shape."""
    y = _added(x, residual, weight, eps)
    if dtype == torch.int8:
        return static_int8_quant.reference(y, scale, None)
    return _codes(y.float(), scale, dtype)


def _codes(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = largest_code(dtype)
    return (y * scale.reciprocal()).clamp(-most, most).to(dtype)
