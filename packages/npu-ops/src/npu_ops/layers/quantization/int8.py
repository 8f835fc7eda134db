"""Gives vLLM's 8-bit layers (weights and activations in int8) their kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops import panels

ops = torch.ops.npu_ops


class NpuInt8LinearKernel(Int8ScaledMMLinearKernel):
    """Activations to int8, static or by token, then `npu_ops::int8_linear`; weights are kept in panels only."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Every scheme that vLLM has."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the weights, give every channel its scale, and make one input scale of a fused layer's."""
        w_name, w_s_name, x_s_name, x_z_name, sum_name = self.layer_param_names
        w, w_s, x_s, x_z, _ = self._get_layer_params(layer)
        pad = (0, -len(w) % panels.COLUMNS)
        if not self.config.is_channelwise:
            w_s = convert_to_channelwise(w_s, layer.logical_widths)
        replace_parameter(layer, w_s_name, F.pad(w_s.data.float().flatten(), pad))
        if not self.config.input_symmetric:
            replace_parameter(layer, sum_name, F.pad(w.data.sum(-1, dtype=torch.int32), pad))
        self.outputs = len(w)
        replace_parameter(layer, w_name, panels.pack(w.data, 8))
        if not self.config.is_static_input_scheme:
            return
        if self.config.input_symmetric:
            scale, zero = x_s.data.float().max().view(1), None
        else:  # the range that holds all shards' ranges
            low, high = ((x_s.data * (limit - x_z.data.int())) for limit in (-128, 127))
            scale = ((high.max() - low.min()) / 255).view(1)
            zero = (-128 - low.min() / scale).round().int()
        replace_parameter(layer, x_s_name, scale)
        replace_parameter(layer, x_z_name, zero)

    def npu_implementation(self) -> str:
        """Return the op, and the activations' scheme."""
        return f"npu_ops::int8_linear ({'static' if self.config.is_static_input_scheme else 'dynamic'} activations)"

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        w, w_s, x_s, x_z, w_sum = self._get_layer_params(layer)
        bias = None if bias is None else bias.data
        if not self.config.is_static_input_scheme:
            return ops.int8_linear_dynamic(x, self.config.input_symmetric, w, w_s, w_sum, bias, self.outputs)
        q = ops.static_int8_quant(x, x_s, x_z)
        return ops.int8_linear(q, x_s, x_z, w, w_s, w_sum, bias, self.outputs, x.dtype)


register_linear_kernel(NpuInt8LinearKernel, PlatformEnum.OOT, "int8")
