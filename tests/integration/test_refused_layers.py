"""Layers of checkpoints that have no kernel are refused by their name, with the way out, before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from npu_ops.errors import UnsupportedLayerError
from npu_ops.layers.quantization.auto_round import NpuAutoRoundConfig
from npu_ops.layers.quantization.gptq import NpuGPTQConfig, NpuGPTQLinearMethod
from npu_ops.layers.quantization.modelopt import NpuModelOptMixedConfig
from npu_ops.layers.quantization.quark import NpuQuarkConfig
from tests.support import quark

if TYPE_CHECKING:
    from torch import nn

LINEAR, EXPERTS = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts"
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "data_type": "int",
    "bits": 4,
    "group_size": 32,
    "sym": True,
}


def layer_of(cls: type[nn.Module]) -> Any:
    """Return a layer of which nothing but its class is there, which is all that is asked before a method is chosen."""
    return cls.__new__(cls)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 2}, "int of 2 bits in the layout of auto_gptq"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "int of 8 bits in the layout of auto_awq"),
        ({"data_type": "mx_fp"}, "mx_fp of 4 bits in the layout of llm_compressor"),
    ],
)
def test_auto_rounds_other_numbers(changes: dict[str, Any], said: str) -> None:
    config = NpuAutoRoundConfig.from_config(AUTO_ROUND | changes)
    with pytest.raises(UnsupportedLayerError, match=f"{LINEAR} has {said} by AutoRound.*let AutoRound write"):
        config.get_quant_method(layer_of(LinearBase), LINEAR)


def test_auto_rounds_experts_of_different_bits() -> None:
    extra = {f"{EXPERTS}.{number}.up_proj": {"bits": bits} for number, bits in enumerate((4, 8))}
    config = NpuAutoRoundConfig.from_config(AUTO_ROUND | {"extra_config": extra})
    with pytest.raises(UnsupportedLayerError, match=f"{EXPERTS} has experts .* to different bits or groups"):
        config.get_quant_method(layer_of(RoutedExperts), EXPERTS)


@pytest.mark.parametrize(
    "rules", [{r".*\.v_proj": {"bits": 8}}, {r".*\.v_proj": {"group_size": 64}}, {r"-:.*\.v_proj": {}}]
)
def test_gptqs_rules_that_part_a_layer(rules: dict[str, Any]) -> None:
    config = NpuGPTQConfig.from_config({"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "dynamic": rules})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    fused = LINEAR.replace("o_proj", "qkv_proj")
    with pytest.raises(UnsupportedLayerError, match=f"{fused} is one layer to vLLM.*different bits or groups"):
        config.get_quant_method(layer_of(LinearBase), fused)
    assert type(config.get_quant_method(layer_of(LinearBase), LINEAR)) is NpuGPTQLinearMethod


def test_what_auto_round_left_as_it_is() -> None:
    """With and without the first part of the name, which vLLM leaves out for some models."""
    extra = {LINEAR: {"bits": 16}}
    config = NpuAutoRoundConfig.from_config(AUTO_ROUND | {"extra_config": extra})
    for name in (LINEAR, LINEAR.removeprefix("model.")):
        assert type(config.get_quant_method(layer_of(LinearBase), name)) is UnquantizedLinearMethod
    other = LINEAR.replace("layers.0", "layers.1")
    assert type(config.get_quant_method(layer_of(LinearBase), other)) is NpuGPTQLinearMethod


def test_modelopts_experts_in_fp8_blocks() -> None:
    layers = {f"{EXPERTS}.0.up_proj": {"quant_algo": "fp8_pb_wo", "group_size": 128}}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = NpuModelOptMixedConfig.from_config(said)
    with pytest.raises(UnsupportedLayerError, match="experts has ModelOpt's FP8_PB_WO.*by one of FP8, NVFP4"):
        config.get_quant_method(layer_of(RoutedExperts), EXPERTS)


def test_quarks_experts_of_integers() -> None:
    config = NpuQuarkConfig.from_config(quark.config({f"{EXPERTS}*": quark.SAYS["int4"]}, ["lm_head"]))
    with pytest.raises(UnsupportedLayerError, match="experts that Quark quantised to .* have no kernel"):
        config.get_quant_method(layer_of(RoutedExperts), EXPERTS)
