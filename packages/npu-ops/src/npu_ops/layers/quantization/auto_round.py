"""Gives AutoRound's own checkpoints (vLLM calls them `inc`) their kernels: integers in the layout of GPTQ or AWQ.

vLLM's own configuration asks for Marlin, XPU's or CPU's kernels, by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.awq import NpuAWQConfig, NpuAWQExperts, NpuAWQLinearMethod
from npu_ops.layers.quantization.gptq import NpuGPTQConfig, NpuGPTQExperts, NpuGPTQLinearMethod
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.inc.config_parser import INCLayerConfig


@register_quantization_config("inc")
class NpuAutoRoundConfig(EveryDtype, INCConfig):
    """INCConfig, whose layers of integers take the registered kernels."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a linear layer, head or mixture of experts.

        Raises UnsupportedLayerError for what has no kernel.
        """
        is_mixture = isinstance(layer, RoutedExperts)
        if not is_mixture and not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        said = self._said_of_experts(layer, prefix) if is_mixture else self._said_of(layer, prefix)
        if not said.quantized:
            return UnquantizedFusedMoEMethod(layer.moe_config) if is_mixture else UnquantizedLinearMethod()
        if not said.is_wna16_int or said.bits not in ((4,) if said.is_awq else (4, 8)):
            layout = said.packing_format.removeprefix("auto_round:")
            msg = (
                f"{prefix} has {said.data_type} of {said.bits} bits in the layout of {layout} by AutoRound, which has "
                "no kernel: quantise it to int of 4 bits, or of 8 in that of auto_gptq, or let AutoRound write the "
                "format llm_compressor."
            )
            raise UnsupportedLayerError(msg)
        config, linear, experts = _in_awq(said) if said.is_awq else _in_gptq(said)
        return experts(config, layer.moe_config) if is_mixture else linear(config)

    def _said_of(self, layer: nn.Module, name: str) -> INCLayerConfig:
        """Return what the checkpoint says of a layer; extra_config may name it without its first part."""
        said = self.config_parser.resolve(layer, name)
        if (self.extra_config or {}).get(f"model.{name}", {}).get("bits", 0) >= 16:
            return replace(said, bits=16, quantized=False)
        return said

    def _said_of_experts(self, layer: nn.Module, prefix: str) -> INCLayerConfig:
        """Return what is said of all experts alike; vLLM 0.32 asks for the mixture as a whole, which nothing names."""
        names = [name for name in self.extra_config or {} if name.startswith((f"{prefix}.", f"model.{prefix}."))]
        every = {self.config_parser.resolve(layer, name) for name in names} or {self._said_of(layer, prefix)}
        if len(every) > 1:
            msg = f"{prefix} has experts that AutoRound rounded to different bits or groups: quantise them alike."
            raise UnsupportedLayerError(msg)
        return every.pop()


def _in_gptq(said: INCLayerConfig) -> tuple[Any, type, type]:
    config = NpuGPTQConfig(
        weight_bits=said.bits,
        group_size=_groups(said),
        desc_act=False,
        is_sym=said.sym,
        lm_head_quantized=False,
        dynamic={},
        full_config={},
    )
    return config, NpuGPTQLinearMethod, NpuGPTQExperts


def _in_awq(said: INCLayerConfig) -> tuple[Any, type, type]:
    config = NpuAWQConfig(
        weight_bits=said.bits,
        group_size=_groups(said),
        zero_point=True,  # stored even where it is the middle
        lm_head_quantized=False,
        modules_to_not_convert=[],
        full_config={},
    )
    return config, NpuAWQLinearMethod, NpuAWQExperts


def _groups(said: INCLayerConfig) -> int:
    if isinstance(said.group_size, int):
        return said.group_size
    msg = f"AutoRound's integers in blocks of {said.group_size} have no kernel: quantise with one group_size."
    raise UnsupportedLayerError(msg)
