"""Gives vLLM's norms the kernels: as out-of-tree classes, and as provider "npu_ops" of vLLM's IR ops."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.models.nemotron import NemotronLayerNorm1P

PROVIDER = "npu_ops"

ops = torch.ops.npu_ops


def _fused_takes(x: Tensor, residual: Tensor) -> bool:
    return x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype


@RMSNorm.register_oot(name="RMSNorm")
class NpuRMSNorm(RMSNorm):
    """RMSNorm on the kernels; norms without a weight or over a part of the width stay with vLLM's own code."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x: [..., H]; with a residual, both are written in place and returned."""
        if self.variance_size_override is not None or not self.has_weight:
            return self.forward_native(x, residual)
        if residual is None:
            return ops.rms_norm(x, self.weight.data, self.variance_epsilon)
        if not _fused_takes(x, residual):
            return self.forward_native(x, residual)
        ops.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual


@GemmaRMSNorm.register_oot(name="GemmaRMSNorm")
class NpuGemmaRMSNorm(GemmaRMSNorm):
    """GemmaRMSNorm on the kernels: weight + 1, product in float32."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As NpuRMSNorm."""
        if residual is None:
            return ops.gemma_rms_norm(x, self.weight.data, self.variance_epsilon)
        if not _fused_takes(x, residual):
            return self.forward_native(x, residual)
        ops.fused_add_gemma_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual


@LayerNorm.register_oot(name="LayerNorm")
class NpuLayerNorm(LayerNorm):
    """vLLM's own layer norm; models that use torch's run that."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns x's shape and dtype, computed in float32."""
        weight, bias = self.weight, self.bias
        return ops.layer_norm(
            x, None if weight is None else weight.data, None if bias is None else bias.data, self.eps, False
        )


@NemotronLayerNorm1P.register_oot(name="NemotronLayerNorm1P")
class NpuNemotronLayerNorm1P(NemotronLayerNorm1P):
    """Nemotron's layer norm: weight + 1."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x: [..., H]; with a residual, the normed sum and the sum."""
        total = x if residual is None else x + residual
        y = ops.layer_norm(total, self.weight.data, self.bias.data, self.eps, True)
        return y if residual is None else (y, total)


def _plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and variance_size is None


def _plain_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return weight is not None and variance_size is None and _fused_takes(x, x_residual)


@ir.ops.rms_norm.register_impl(PROVIDER, supported=True, supports_args=_plain)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """vLLM IR's rms_norm."""
    assert weight is not None
    assert variance_size is None
    return ops.rms_norm(x, weight, epsilon)


@ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supported=True, supports_args=_plain_fused, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """vLLM IR's fused_add_rms_norm: writes both arguments, and returns them."""
    assert weight is not None
    assert variance_size is None
    ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
