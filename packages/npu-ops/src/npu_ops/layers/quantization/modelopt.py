"""Gives the experts of ModelOpt's checkpoints (NVIDIA's fp8, NVFP4 and MXFP8, or some of each) their kernels.

Their linear layers choose among registered kernels anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.modelopt import (
    LINEAR_ALGOS,
    ModelOptFp8Config,
    ModelOptFp8MoEMethod,
    ModelOptLinearMethod,
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptMxFp8FusedMoE,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import QuantizedExperts
from npu_ops.layers.quantization.mxfp8 import BLOCK, NAN, Mxfp8Experts
from npu_ops.layers.quantization.nvfp4 import nvfp4_experts
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


class NpuModelOptFp8Experts(QuantizedExperts, ModelOptFp8MoEMethod):
    """A scale a projection, and one of what goes in, on `npu_ops::fp8_experts`."""

    def __init__(self, quant_config: ModelOptFp8Config, moe_config: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe_config)
        self.quant_config = quant_config
        if quant_config.quant_method != "FP8":
            msg = f"experts in ModelOpt's {quant_config.quant_method} have no kernel: quantise them as FP8 or NVFP4."
            raise UnsupportedLayerError(msg)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights as they are; each projection keeps its scale."""
        weights, scales, inputs = (
            (getattr(layer, f"w13_{name}").data, getattr(layer, f"w2_{name}").data)
            for name in ("weight", "weight_scale", "input_scale")
        )
        self.pack_fp8(layer, weights, scales, None, -1, inputs)


class NpuModelOptNvfp4Experts(QuantizedExperts, ModelOptNvFp4FusedMoE):
    """Weights as the checkpoint has them, activations as they are, on `npu_ops::weight_only_experts`."""

    supports_pre_processed_weights = False

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe_config)
        self.quant_config = quant_config
        self.use_a16, self.use_global_sf = quant_config.quant_method == "W4A16_NVFP4", False
        if quant_config.moe_activation_override is not None:
            msg = "activations of NVFP4 experts are not rounded: leave out moe.activation in --quantization-config."
            raise UnsupportedLayerError(msg)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        whole = {name: getattr(layer, f"{name}_weight_scale_2").data for name in ("w13", "w2")}
        nvfp4_experts(self, layer, "weight", whole)


@register_weight_loader_v2_supported_method
class NpuModelOptMxfp8Linear(ModelOptLinearMethod):
    """ModelOptLinearMethod, whose scales are NaN until they are loaded: vLLM takes whatever is in their memory."""

    def create_weights(self, layer: Any, *args: Any, **more: Any) -> None:
        """Make the parameters; where the checkpoint has no scales, loading ends in an error."""
        super().create_weights(layer, *args, **more)
        layer.weight_scale.data.fill_(NAN)


class NpuModelOptMxfp8Experts(Mxfp8Experts, ModelOptMxFp8FusedMoE):
    """MXFP8 weights, activations as they are, on `npu_ops::weight_only_experts`."""

    def __init__(self, quant_config: ModelOptMxFp8Config, moe_config: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe_config)
        self.quant_config, self.weight_block_size = quant_config, [1, BLOCK]


@register_quantization_config("modelopt")
class NpuModelOptFp8Config(EveryDtype, ModelOptFp8Config):
    """ModelOptFp8Config, whose experts take npu-ops' kernels."""

    FusedMoEMethodCls = NpuModelOptFp8Experts


@register_quantization_config("modelopt_fp4")
class NpuModelOptNvfp4Config(EveryDtype, ModelOptNvFp4Config):
    """ModelOptNvFp4Config, whose experts take npu-ops' kernels."""

    FusedMoEMethodCls = NpuModelOptNvfp4Experts


@register_quantization_config("modelopt_mxfp8")
class NpuModelOptMxfp8Config(EveryDtype, ModelOptMxFp8Config):
    """ModelOptMxFp8Config, whose experts take npu-ops' kernels."""

    FusedMoEMethodCls = NpuModelOptMxfp8Experts

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer."""
        return _unloaded_scales_are_nan(super().get_quant_method(layer, prefix))


@register_quantization_config("modelopt_mixed")
class NpuModelOptMixedConfig(EveryDtype, ModelOptMixedPrecisionConfig):
    """ModelOptMixedPrecisionConfig, an algorithm for each layer, whose experts take npu-ops' kernels."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer.

        Raises UnsupportedLayerError for what has no kernel.
        """
        algorithm = None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)
        is_mixture = isinstance(layer, RoutedExperts)
        known = EXPERTS if is_mixture else LINEAR_ALGOS
        if algorithm is not None and algorithm not in known:
            msg = f"{prefix} has ModelOpt's {algorithm}, which has no kernel: quantise it by one of {', '.join(known)}."
            raise UnsupportedLayerError(msg)
        if is_mixture and algorithm is not None:
            method, config = EXPERTS[algorithm]
            return method(getattr(self, config), layer.moe_config)
        method = super().get_quant_method(layer, prefix)
        return _unloaded_scales_are_nan(method) if algorithm == "MXFP8" else method


EXPERTS: dict[str, tuple[Any, str]] = {
    "FP8": (NpuModelOptFp8Experts, "fp8_config"),
    "NVFP4": (NpuModelOptNvfp4Experts, "nvfp4_config"),
    "W4A16_NVFP4": (NpuModelOptNvfp4Experts, "w4a16_nvfp4_config"),
    "MXFP8": (NpuModelOptMxfp8Experts, "mxfp8_config"),
}
"""By algorithm the method of a mixture, and the part of a mixed configuration that it takes."""


def _unloaded_scales_are_nan(method: Any) -> Any:
    is_linear = type(method) is ModelOptLinearMethod
    return NpuModelOptMxfp8Linear(method.spec, method.ctx, method.fmt) if is_linear else method
