"""Makes bf16 checkpoints int8 while they load (`--quantization npu_int8`): linear layers and experts, a scale a row.

vLLM 0.32 has a name for that for experts only (int8_per_channel_weight_only), which leaves linear layers as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter

from npu_ops import panels
from npu_ops.layers.quantization.experts import WHOLE
from npu_ops.layers.quantization.fp8_experts import NpuInt8OnlineMoEMethod
from npu_ops.layers.quantization.without_settings import ConfigWithoutSettings

ops = torch.ops.npu_ops

NAME = "npu_int8"


class NpuInt8OnlineLinearMethod(OnlineLinearBase):
    """`npu_ops::weight_only_linear` with 8 bits; activations stay as they are."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round each row to int8 by its largest magnitude, and pack."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = self.get_weight_for_quantization(layer).data
        self.outputs = len(weight)
        codes, scales = panels.pack_rounded(weight)
        replace_parameter(layer, "weight", codes)
        replace_parameter(layer, "weight_scale", scales)
        layer._already_called_process_weights_after_loading = True

    def npu_implementation(self) -> str:
        """Return the op, and the weights' format."""
        return "npu_ops::weight_only_linear (int8 by channel)"

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        bias = None if bias is None else bias.data
        return ops.weight_only_linear(x, layer.weight, layer.weight_scale, None, None, bias, self.outputs, WHOLE)


@register_quantization_config(NAME)
class NpuInt8Config(ConfigWithoutSettings):
    """Every linear layer and expert in int8; embedding and router as they are, the head as NPU_HEAD_BITS says."""

    name = NAME

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer or mixture of experts."""
        if isinstance(layer, RoutedExperts):
            return NpuInt8OnlineMoEMethod(moe=layer.moe_config)
        return NpuInt8OnlineLinearMethod() if isinstance(layer, LinearBase) else None
