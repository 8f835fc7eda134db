"""Gives the experts of Quark's checkpoints (AMD's) their kernels; linear layers choose among registered ones anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.quark_moe import (
    QuarkOCP_MX_MoEMethod,
    QuarkW8A8Fp8MoEMethod,
    QuarkW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kMxfp4Dynamic,
    kMxfp4Static,
)

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import QuantizedExperts
from npu_ops.layers.quantization.mxfp4 import e2m1_experts
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

_FP8 = {
    kFp8StaticTensorSym: "per_tensor",
    kFp8StaticChannelSym: "per_channel",
    kFp8Static128BlockSym: "per_block",
}


class NpuQuarkFp8Experts(QuantizedExperts, QuarkW8A8Fp8MoEMethod):
    """A scale a projection, row or block of 128 x 128, on `npu_ops::fp8_experts`."""

    def __init__(self, moe: FusedMoEConfig, weights: QuantKey, inputs: QuantKey | None) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        _require(weights in _FP8 and inputs is not None, weights, inputs)
        self.weight_quant_key, self.activation_quant_key, self.has_bias = weights, inputs, moe.has_bias
        self.weight_qscheme, self.model_type = _FP8[weights], None
        self.weight_block_size = [128, 128] if weights == kFp8Static128BlockSym else None
        self.block_quant, self.static_input_scales = self.weight_block_size is not None, inputs == kFp8StaticTensorSym

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights as they are; each projection keeps its scale."""
        weights, scales = (
            (getattr(layer, f"w13_{name}").data, getattr(layer, f"w2_{name}").data)
            for name in ("weight", "weight_scale")
        )
        inputs = (layer.w13_input_scale, layer.w2_input_scale)
        block = (128, 128) if self.block_quant else None
        self.pack_fp8(layer, weights, scales, block, 128 if block else -1, inputs)


class NpuQuarkInt8Experts(QuantizedExperts, QuarkW8A8Int8MoEMethod):
    """A scale a row, and one a token of what goes in, on `npu_ops::int8_experts`."""

    def __init__(self, moe: FusedMoEConfig, weights: QuantKey, inputs: QuantKey | None) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        _require((weights, inputs) == (kInt8StaticChannelSym, kInt8DynamicTokenSym), weights, inputs)
        self.weight_quant_key, self.activation_quant_key, self.has_bias = weights, inputs, moe.has_bias
        self.weight_qscheme, self.static_input_scales = "per_channel", False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        parts = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        self.pack_int8(layer, *(getattr(layer, name).data for name in parts))


class NpuQuarkMxfp4Experts(QuantizedExperts, QuarkOCP_MX_MoEMethod):
    """MXFP4, activations as they are, on `npu_ops::weight_only_experts`."""

    def __init__(self, moe: FusedMoEConfig, weights: QuantKey, inputs: QuantKey | None) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        _require(weights == kMxfp4Static and inputs in (None, kMxfp4Dynamic), weights, inputs)
        self.weight_quant_key, self.activation_quant_key, self.has_bias = weights, inputs, moe.has_bias
        self.weight_dtype, self.static_input_scales = "mxfp4", False
        self.mxfp4_backend: Any = None  # whose sizes would be rounded up to

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: weights uint8 [E, rows, K / 2], scales uint8 [E, rows, K / 32]."""
        e2m1_experts(self, layer, "weight")


EXPERTS: dict[Any, Any] = {
    QuarkW8A8Fp8MoEMethod: NpuQuarkFp8Experts,
    QuarkW8A8Int8MoEMethod: NpuQuarkInt8Experts,
    QuarkOCP_MX_MoEMethod: NpuQuarkMxfp4Experts,
}
"""vLLM's method of experts -> ours."""


@register_quantization_config("quark")
class NpuQuarkConfig(EveryDtype, QuarkConfig):
    """QuarkConfig, whose experts take npu-ops' kernels."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises UnsupportedLayerError for experts that have no kernel.
        """
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        weights, inputs, method = self.get_quant_method_target(prefix, type(layer))
        if method is UnquantizedFusedMoEMethod:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        _require(method in EXPERTS, weights, inputs)
        return EXPERTS[method](layer.moe_config, weights, inputs)


def _require(has_kernel: bool, weights: QuantKey | None, inputs: QuantKey | None) -> None:
    if not has_kernel:
        msg = (
            f"experts that Quark quantised to {weights} with activations in {inputs} have no kernel: quantise them to "
            "fp8, to int8 by channel and token, or to MXFP4, or exclude them."
        )
        raise UnsupportedLayerError(msg)
