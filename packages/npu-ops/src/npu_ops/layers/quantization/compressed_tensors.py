"""Gives compressed-tensors checkpoints of mixtures of experts their kernels; vLLM's configuration asks for its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as mxfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a8_int8 as w4a8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as int8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as mxfp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.mxfp4 import e2m1_experts
from npu_ops.layers.quantization.mxfp8 import BLOCK as MXFP8_BLOCK
from npu_ops.layers.quantization.mxfp8 import Mxfp8Experts
from npu_ops.layers.quantization.nvfp4 import BLOCK as NVFP4_BLOCK
from npu_ops.layers.quantization.nvfp4 import NpuNvfp4LinearKernel, nvfp4_experts
from npu_ops.layers.quantization.weight_only import values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig


class NpuPackedExperts(QuantizedExperts, wna16.CompressedTensorsWNA16MoEMethod):
    """Integer weights of 4 and 8 bits on `npu_ops::weight_only_experts`."""

    def __init__(self, weights: QuantizationArgs, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_quant, self.input_quant, self.strategy = weights, None, weights.strategy
        self.num_bits, self.symmetric = weights.num_bits, weights.symmetric
        self.packed_factor = 32 // self.num_bits
        self.group_size = weights.group_size or -1
        if self.num_bits not in (4, 8) or weights.actorder == "group":
            msg = f"experts of {self.num_bits} bits, order {weights.actorder}: 4 and 8 bits in plain order are loaded."
            raise UnsupportedLayerError(msg)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: int32 [E, N, K / pack], scales [E, N, groups], zero points int32 [E, N / pack, groups]."""
        bits = self.num_bits

        def integers(name: str, expert: int) -> Integers:
            scales = getattr(layer, f"{name}_weight_scale").data[expert]
            values, zeros = values_of(getattr(layer, f"{name}_weight_packed").data[expert], bits), None
            if not self.symmetric:
                zeros = values_of(getattr(layer, f"{name}_weight_zero_point").data[expert].t(), bits).t()
                zeros = (zeros.short() - (128 if bits == 8 else 0)).to(torch.int8)
            return Integers(values.view(torch.int8) ^ -128 if bits == 8 else values, scales, zeros)

        self.pack_integers(layer, bits, self.group_size, lambda e: integers("w13", e), lambda e: integers("w2", e))


class NpuInt8Experts(QuantizedExperts, int8.CompressedTensorsW8A8Int8MoEMethod):
    """Weights and activations in int8, by channel and by token, on `npu_ops::int8_experts`."""

    def __init__(self, weights: QuantizationArgs, inputs: QuantizationArgs, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_quant, self.input_quant, self.static_input_scales = weights, inputs, False
        if weights.strategy != "channel" or not inputs.symmetric:
            msg = (
                "int8 experts have kernels for weights by channel and symmetric activations by token: quantise them so."
            )
            raise UnsupportedLayerError(msg)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        w13, s13, w2, s2 = (getattr(layer, f"{w}_weight{of}").data for w in ("w13", "w2") for of in ("", "_scale"))
        self.pack_int8(layer, w13, s13, w2, s2)


class NpuFp8Experts(QuantizedExperts, fp8.CompressedTensorsW8A8Fp8MoEMethod):
    """Weights in fp8 by tensor, channel or block on `npu_ops::fp8_experts`; activations as the checkpoint says."""

    def __init__(self, weights: QuantizationArgs, inputs: QuantizationArgs, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_quant, self.input_quant = weights, inputs
        self.weight_block_size = weights.block_structure if weights.strategy == "block" else None
        self.block_quant = self.weight_block_size is not None
        self.static_input_scales = not inputs.dynamic

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights as they are; each projection keeps its scale."""
        weights, scales = ((getattr(layer, f"w13_{n}").data, getattr(layer, f"w2_{n}").data) for n in _FP8)
        block = tuple(self.weight_block_size) if self.weight_block_size else None
        x_scales = (layer.w13_input_scale, layer.w2_input_scale) if self.static_input_scales else (None, None)
        self.pack_fp8(layer, weights, scales, block, block[1] if block else -1, x_scales)


class NpuMxfp4Experts(QuantizedExperts, mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod):
    """MXFP4 weights, activations as they are (as vLLM's Marlin), on `npu_ops::weight_only_experts`."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.group_size = 32

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        e2m1_experts(self, layer, "weight_packed")


class NpuNvfp4Experts(QuantizedExperts, nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod):
    """NVFP4 weights, activations as they are, on `npu_ops::weight_only_experts`."""

    def __init__(self, inputs: QuantizationArgs | None, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.group_size, self.use_a16 = NVFP4_BLOCK, inputs is None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack; the checkpoint has the inverses of the scales of whole projections."""
        whole = {name: 1.0 / getattr(layer, f"{name}_weight_global_scale").data for name in ("w13", "w2")}
        nvfp4_experts(self, layer, "weight_packed", whole)


class NpuMxfp8Experts(Mxfp8Experts, mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod):
    """MXFP8 weights, activations as they are, on `npu_ops::weight_only_experts`."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_block_size = [1, MXFP8_BLOCK]


class NpuW4A8Experts(QuantizedExperts, w4a8.CompressedTensorsW4A8Int8MoEMethod):
    """Weights of 4 bits beside activations of 8, which stay as they are, on `npu_ops::weight_only_experts`."""

    def __init__(self, weights: QuantizationArgs, inputs: QuantizationArgs, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_quant, self.input_quant, self.static_input_scales = weights, inputs, False
        self.has_bias, self.group_size = moe.has_bias, weights.group_size or -1
        if not moe.is_act_and_mul:
            msg = "experts without gates have no W4A8 in vLLM: quantise them as W4A16."
            raise UnsupportedLayerError(msg)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: int8 [E, N, K] from -8 to 7, scales [E, N, groups]."""

        def integers(name: str, expert: int) -> Integers:
            values = (getattr(layer, f"{name}_weight").data[expert] + 8).view(torch.uint8)
            return Integers(values, getattr(layer, f"{name}_weight_scale").data[expert])

        self.pack_integers(layer, 4, self.group_size, lambda e: integers("w13", e), lambda e: integers("w2", e))


class NpuNvfp4Weights(CompressedTensorsW4A4Fp4):
    """NVFP4 weights beside whole activations (W4A16), for which vLLM would name kernels of GPUs."""

    def __init__(self) -> None:
        """Take npu-ops' kernel."""
        self.use_a16, self.group_size = True, NVFP4_BLOCK
        self.kernel = NpuNvfp4LinearKernel(NvFp4LinearLayerConfig())


_FP8 = ("weight", "weight_scale")


@register_quantization_config("compressed-tensors")
class NpuCompressedTensorsConfig(CompressedTensorsConfig):
    """CompressedTensorsConfig, whose experts take npu-ops' kernels."""

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *others: Any, **more: Any) -> Any:
        if input_quant is None and self._is_nvfp4_format(weight_quant):
            return NpuNvfp4Weights()
        return super()._get_scheme_from_parts(weight_quant, input_quant, *others, **more)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        if any(scheme != schemes[0] for scheme in schemes):
            msg = f"{prefix}: the projections of an expert must be quantised alike."
            raise UnsupportedLayerError(msg)
        return self._experts(schemes[0], layer.moe_config, prefix)

    def _experts(self, scheme: dict[str, Any] | None, moe: FusedMoEConfig, prefix: str) -> Any:
        if scheme is None:
            return UnquantizedFusedMoEMethod(moe)
        weights: Any = scheme.get("weights")
        inputs: Any = scheme.get("input_activations")
        nvfp4_too = inputs is None or self._is_nvfp4_format(inputs)
        packed = self._is_wNa16_group_channel(weights, inputs) and scheme.get("format") == "pack-quantized"
        by_token = inputs is not None and self._is_dynamic_token_w8a8(weights, inputs)
        kinds: list[tuple[bool, Callable[[], Any]]] = [
            (self._is_mxfp4(weights), lambda: NpuMxfp4Experts(moe)),
            (self._is_nvfp4_format(weights) and nvfp4_too, lambda: NpuNvfp4Experts(inputs, moe)),
            (self._is_mxfp8(weights), lambda: NpuMxfp8Experts(moe)),
            (packed, lambda: NpuPackedExperts(weights, moe)),
            (self._is_dynamic_token_w4a8_int(weights, inputs), lambda: NpuW4A8Experts(weights, inputs, moe)),
            (self._is_fp8_w8a8(weights, inputs), lambda: NpuFp8Experts(weights, inputs, moe)),
            (by_token, lambda: NpuInt8Experts(weights, inputs, moe)),
        ]
        for fits, make in kinds:
            if fits:
                return make()
        rounded = f"activations of {inputs.num_bits} bits" if inputs is not None else "whole activations"
        msg = (
            f"{prefix}: experts in {scheme.get('format')}, {weights.num_bits} bits by {weights.strategy}, {rounded}, "
            "have no kernel: quantise them as W4A16, W8A16, W4A8, W8A8 (int8 or fp8), MXFP4, MXFP8 or NVFP4."
        )
        raise UnsupportedLayerError(msg)
