"""Makes AWQ checkpoints choose among the registered kernels: vLLM's own configuration asks for Triton's here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import (
    AutoAWQConfig,
    AutoAWQMarlinLinearMethod,
    AutoAWQMoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.weight_only import register_one_group
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

_EIGHTS = -0x77777778  # an int32 of eight of them
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ puts the values of eight neighbours


class NpuAWQLinearMethod(AutoAWQMarlinLinearMethod):
    """vLLM's method that takes the best registered kernel, without its question whether Marlin runs."""

    def __init__(self, quant_config: NpuAWQConfig) -> None:
        """Take the weights' type from the configuration."""
        LinearMethodBase.__init__(self)
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """As the base method, which has no group for a rank that has a part of one of all inputs (group_size -1).

        Zero points that a symmetric checkpoint leaves out are the middle.
        """
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        config, load = self.quant_config, extra_weight_attrs["weight_loader"]
        if config.group_size == -1:
            register_one_group(layer, sum(output_partition_sizes), config.pack_factor, params_dtype, load)
        if config.symmetric:
            layer.qzeros.data.fill_(_EIGHTS)


class NpuAWQExperts(QuantizedExperts, AutoAWQMoEMethod):
    """AutoAWQMoEMethod on `npu_ops::weight_only_experts`."""

    def __init__(self, quant_config: NpuAWQConfig, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.quant_config, self.input_dtype = quant_config, None
        if quant_config.weight_bits != 4 or quant_config.group_size == -1:
            msg = "AWQ experts are loaded with 4 bits and groups: quantise them so."
            raise UnsupportedLayerError(msg)

    def create_weights(self, layer: Any, num_experts: int, *sizes: Any, **more: Any) -> None:
        """As the base method; zero points that a symmetric checkpoint leaves out are the middle."""
        super().create_weights(layer, num_experts, *sizes, **more)
        if self.quant_config.symmetric:
            layer.w13_qzeros.data.fill_(_EIGHTS)
            layer.w2_qzeros.data.fill_(_EIGHTS)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: qweight int32 [E, K, N / 8] and zero points [E, groups, N / 8] in AWQ's order."""

        def integers(name: str, expert: int) -> Integers:
            q, s, z = (getattr(layer, f"{name}_{part}").data[expert] for part in ("qweight", "scales", "qzeros"))
            return Integers(_values(q).t(), s.t(), _values(z).t().to(torch.int8))

        group = self.quant_config.group_size
        self.pack_integers(layer, 4, group, lambda e: integers("w13", e), lambda e: integers("w2", e))


def _values(packed: Tensor) -> Tensor:
    """Unpack int32 [rows, columns]: uint8 [rows, columns * 8]."""
    octets = packed.contiguous().view(torch.uint8)
    values = torch.stack((octets & 15, octets >> 4), dim=-1).view(len(packed), -1, 8)
    return values[..., list(_ORDER)].flatten(1)


@register_quantization_config("auto_awq")
class NpuAWQConfig(EveryDtype, AutoAWQConfig):
    """AutoAWQConfig, whose linear layers take the registered kernel, and whose experts those of npu-ops."""

    def __init__(self, weight_bits: int, group_size: int, zero_point: bool, *others: Any, **more: Any) -> None:
        """As AutoAWQConfig; a symmetric checkpoint (zero_point false) may have zero points all the same."""
        super().__init__(weight_bits, group_size, True, *others, **more)
        self.symmetric = not zero_point

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer, quantised head or mixture of experts."""
        if isinstance(layer, RoutedExperts):
            if is_layer_skipped(prefix, self.modules_to_not_convert, match_mode="substring"):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return NpuAWQExperts(self, layer.moe_config)
        if not isinstance(layer, LinearBase) and not (isinstance(layer, ParallelLMHead) and self.lm_head_quantized):
            return super().get_quant_method(layer, prefix)
        skipped, fused = self.modules_to_not_convert, self.packed_modules_mapping
        if is_layer_skipped(prefix, skipped, fused, match_mode="substring"):
            return UnquantizedLinearMethod()
        return NpuAWQLinearMethod(self)
