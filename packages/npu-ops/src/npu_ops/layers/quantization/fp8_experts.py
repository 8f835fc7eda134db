"""Gives the experts of fp8 checkpoints, and those that are made fp8 or int8 while loading, their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.experts_int8 import ExpertsInt8Config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerBlockOnlineMoEMethod,
    Fp8PerTensorOnlineMoEMethod,
    Fp8PtpcOnlineMoEMethod,
)
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from npu_ops import compat
from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.fp8_parts import NpuFp8LinearMethod
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class NpuFp8MoEMethod(QuantizedExperts, Fp8MoEMethod):
    """Fp8MoEMethod on `npu_ops::fp8_experts`."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(layer.moe_config)
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.weight_scale_refine = self.weight_block_size is not None, None
        self.weight_scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights as they are; each projection keeps its scale."""
        weights, scales = (
            (getattr(layer, f"w13_{name}").data, getattr(layer, f"w2_{name}").data)
            for name in ("weight", self.weight_scale_name)
        )
        rows, columns = self.weight_block_size or (0, 0)
        x_scales = (layer.w13_input_scale, layer.w2_input_scale)
        self.pack_fp8(layer, weights, scales, (rows, columns) if rows else None, columns or -1, x_scales)


@register_quantization_config("fp8")
class NpuFp8Config(EveryDtype, Fp8Config):
    """Fp8Config, whose experts take npu-ops' kernels; linear layers choose among registered kernels anyway.

    Scales of blocks that lie across the parts of a layer are refused.
    """

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer."""
        if not isinstance(layer, RoutedExperts) or self.store_dtype == "mxfp4" or self._skips(prefix):
            method = super().get_quant_method(layer, prefix)
            return NpuFp8LinearMethod(self) if type(method) is Fp8LinearMethod else method
        return NpuFp8MoEMethod(self, layer)

    def _skips(self, prefix: str) -> bool:
        skipped, fused = self.ignored_layers, self.packed_modules_mapping
        return is_layer_skipped(prefix, skipped, fused, match_mode=self.ignored_layers_match_mode)


class _OnlineFp8(QuantizedExperts):
    """The weights become fp8 in vLLM's process_weights_after_loading, which ends in _setup_kernel."""

    interleaves = True
    weight_block_size: list[int] | None = None
    per_row = False

    def __init__(self, *, moe: FusedMoEConfig) -> None:
        self.begin(moe)
        compat.without_requantization(self)
        self.block_quant = self.weight_block_size is not None

    def _setup_kernel(
        self, layer: Any, w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor, *_: Any, **__: Any
    ) -> None:
        rows, columns = self.weight_block_size or (0, 0)
        self.pack_fp8(layer, (w13, w2), (w13_scale, w2_scale), (rows, columns) if rows else None, columns or -1)


class NpuFp8PerTensorOnlineMoEMethod(_OnlineFp8, Fp8PerTensorOnlineMoEMethod):
    """A scale an expert and layer."""


class NpuFp8PerChannelOnlineMoEMethod(_OnlineFp8, Fp8PtpcOnlineMoEMethod):
    """A scale a row."""


class NpuFp8PerBlockOnlineMoEMethod(_OnlineFp8, Fp8PerBlockOnlineMoEMethod):
    """A scale a block of 128 x 128."""

    weight_block_size = [128, 128]  # noqa: RUF012


class NpuInt8OnlineMoEMethod(QuantizedExperts, Int8OnlineMoEMethod):
    """A scale a row; activations as they are, as vLLM names it: int8_per_channel_weight_only."""

    interleaves = True

    def __init__(self, *, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        compat.without_requantization(self)

    def _setup_kernel(self, layer: Any) -> None:
        def integers(name: str, expert: int) -> Integers:
            scale = getattr(layer, f"{name}_scale").data[expert].to(torch.float32)
            return Integers(getattr(layer, f"{name}_weight").data[expert], scale[:, None])

        self.pack_integers(layer, 8, -1, lambda e: integers("w13", e), lambda e: integers("w2", e))


_ONLINE: dict[type, type] = {
    Fp8PerTensorOnlineMoEMethod: NpuFp8PerTensorOnlineMoEMethod,
    Fp8PtpcOnlineMoEMethod: NpuFp8PerChannelOnlineMoEMethod,
    Fp8PerBlockOnlineMoEMethod: NpuFp8PerBlockOnlineMoEMethod,
    Int8OnlineMoEMethod: NpuInt8OnlineMoEMethod,
}


@RoutedExperts.register_oot(name="RoutedExperts")
class NpuRoutedExperts(RoutedExperts):
    """RoutedExperts, which take npu-ops' methods for what vLLM makes fp8 or int8 while loading."""

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        if isinstance(quant_config, ExpertsInt8Config):
            return NpuInt8OnlineMoEMethod(moe=moe_config)
        if isinstance(quant_config, OnlineQuantizationConfig):
            resolved = quant_config.resolve_quant_method_cls(type(self), prefix)
            method = None if resolved is None else resolved[-1]
            if method in _ONLINE:
                return _ONLINE[method](moe=moe_config)
            if method is not None:
                msg = f"{prefix}: vLLM's {method.__name__} has no kernel here: take fp8 or int8 for the experts."
                raise UnsupportedLayerError(msg)
        return super()._get_quant_method(prefix, quant_config, moe_config)
