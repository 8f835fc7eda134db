"""Makes AWQ checkpoints choose among the registered kernels: vLLM's own configuration asks for Triton's here."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class NpuAWQLinearMethod(AutoAWQMarlinLinearMethod):
    """vLLM's method that takes the best registered kernel, without its question whether Marlin runs."""

    def __init__(self, quant_config: AutoAWQConfig) -> None:
        """Take the weights' type from the configuration."""
        LinearMethodBase.__init__(self)
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None


@register_quantization_config("auto_awq")
class NpuAWQConfig(AutoAWQConfig):
    """AutoAWQConfig, whose linear layers take the registered kernel; mixtures of experts as vLLM chooses."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer or quantised head."""
        if not isinstance(layer, LinearBase) and not (isinstance(layer, ParallelLMHead) and self.lm_head_quantized):
            return super().get_quant_method(layer, prefix)
        skipped, fused = self.modules_to_not_convert, self.packed_modules_mapping
        if is_layer_skipped(prefix, skipped, fused, match_mode="substring"):
            return UnquantizedLinearMethod()
        return NpuAWQLinearMethod(self)
