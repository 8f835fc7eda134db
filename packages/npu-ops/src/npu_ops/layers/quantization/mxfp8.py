"""Gives layers with MXFP8 weights (e4m3 in blocks of 32, scales e8m0; OCP Microscaling Formats 1.0) their kernels.

No kernel reads this format: the weights become the model's dtype when they are loaded, which bfloat16 and float32 hold
exactly, and take its memory and time. Activations stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops.layers.linear import plain, plain_weight
from npu_ops.layers.quantization.experts import QuantizedExperts

logger = init_logger("vllm.npu_ops.mxfp8")

ops = torch.ops.npu_ops

BLOCK = 32
_DEQUANTISED = "Weights in MXFP8 are dequantised to %s when they are loaded: no kernel reads them."
_BIAS, NAN = 127, 255  # of e8m0


class NpuMxfp8LinearKernel(Mxfp8LinearKernel):
    """`npu_ops::linear` on weights that were dequantised on the way in."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        """Matrices of whole blocks."""
        if c.bmm_batch_size is not None:
            return False, "batches of matrices in MXFP8 have no kernel"
        return c.weight_shape[1] % BLOCK == 0, f"{c.weight_shape[1]} inputs are no whole number of blocks of {BLOCK}"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise: weight float8_e4m3fn [N, K], weight_scale uint8 [N, K / 32]. Raises ValueError for NaN."""
        dtype = layer.params_dtype if isinstance(layer.params_dtype, torch.dtype) else torch.get_default_dtype()
        logger.info_once(_DEQUANTISED, dtype)
        replace_parameter(layer, "weight", dequantized(layer.weight.data, layer.weight_scale.data).to(dtype))
        del layer.weight_scale

    def npu_implementation(self) -> str:
        """Return the op, and what the checkpoint held."""
        return "npu_ops::linear (mxfp8, dequantised when loaded)"

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        return ops.linear(x, plain_weight(layer), None if bias is None else plain(bias))


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3 weights [N, K] times their scales, uint8 [N, K / 32], as float32; raises ValueError for NaN."""
    scale = scale.view(torch.uint8)
    if (scale == NAN).any() or (weight.view(torch.uint8) & 127 == 127).any():
        msg = (
            "MXFP8 weights have NaN among their values or scales: the checkpoint is damaged, or has no scale of a "
            "layer that is not quantised: the quantization_config must leave it out by the name that vLLM has for it."
        )
        raise ValueError(msg)
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    return (blocks * torch.exp2(scale.float() - _BIAS)[..., None]).flatten(-2)


class DequantizedExperts(QuantizedExperts):
    """Experts in MXFP8 on `npu_ops::fused_experts`: w13_ and w2_ are dequantised when they are loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise one expert after another: weight float8_e4m3fn [E, N, K], weight_scale uint8 [E, N, K / 32]."""
        dtype = self.moe.in_dtype
        logger.info_once(_DEQUANTISED, dtype)

        def whole(name: str) -> Tensor:
            pairs = (getattr(layer, f"{name}_{of}").data for of in ("weight", "weight_scale"))
            return torch.stack([dequantized(weight, scale).to(dtype) for weight, scale in zip(*pairs, strict=True)])

        self._finish(layer, ops.fused_experts, (whole("w13"), whole("w2")), (), "mxfp8, dequantised when loaded")

    def gate_arguments(self) -> tuple[Any, ...]:
        """Return all of the gate: this op takes rows as the checkpoint has them."""
        return tuple(self.gate)


register_linear_kernel(NpuMxfp8LinearKernel, PlatformEnum.OOT, "mxfp8")
