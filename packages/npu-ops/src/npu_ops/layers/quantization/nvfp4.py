"""Gives layers with NVFP4 weights (e2m1 in blocks of 16, scales e4m3 and one of the layer) their kernel.

Activations stay as they are, as on every device without FP4 arithmetic. Format: NVIDIA, "Introducing NVFP4", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops import panels
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.weight_only import SmallFloatsLinear

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = init_logger("vllm.npu_ops.nvfp4")

BLOCK = 16
_WHOLE = "Activations beside weights in NVFP4 are not rounded."


class NpuNvfp4LinearKernel(SmallFloatsLinear, NvFp4LinearKernel):
    """`npu_ops::weight_only_linear` on codes and scales as the checkpoint has them."""

    block = BLOCK

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Every layer: all have the same form."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: weight uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16], weight_global_scale float32."""
        logger.info_once(_WHOLE)
        weight, scales = layer.weight.data, layer.weight_scale.data
        self.outputs = len(weight)
        factors = layer.weight_global_scale.data.float().expand(self.outputs)
        replace_parameter(layer, "weight", panels.pack(panels.e2m1_codes(weight), 4))
        replace_parameter(layer, "weight_scale", panels.pack_scaled_groups(whole_numbers(scales), factors))

    def npu_implementation(self) -> str:
        """Return the op, and the weights' format."""
        return "npu_ops::weight_only_linear (nvfp4)"


def whole_numbers(scales: Tensor) -> Tensor:
    """Return scales in float8_e4m3fn; raises ValueError for NaN among them."""
    if (scales.view(torch.uint8) & 127 == 127).any():
        msg = "NVFP4 weights have NaN among their scales: the checkpoint is damaged."
        raise ValueError(msg)
    return scales


def nvfp4_experts(method: QuantizedExperts, layer: Any, weight: str, whole: Mapping[str, Tensor]) -> None:
    """Pack w13_ and w2_ of the name `weight`, uint8 [E, rows, K / 2], with their weight_scale, float8_e4m3fn.

    `whole`: the scales of whole projections by w13 and w2, float32 [E] or [E, projections].
    """
    logger.info_once(_WHOLE)

    def of(name: str, expert: int) -> Integers:
        scales = whole_numbers(getattr(layer, f"{name}_weight_scale").data[expert])
        of_projections = whole[name][expert].float().reshape(-1)
        factors = of_projections.repeat_interleave(len(scales) // len(of_projections))
        return Integers(panels.e2m1_codes(getattr(layer, f"{name}_{weight}").data[expert]), scales, factors=factors)

    method.pack_integers(layer, 4, BLOCK, lambda e: of("w13", e), lambda e: of("w2", e))
    method.format = "nvfp4"


register_linear_kernel(NpuNvfp4LinearKernel, PlatformEnum.OOT, "nvfp4")
