"""Makes a checkpoint as AMD's Quark exports it, a scheme a layer; what it means lies in `exact`.

The layouts are those that vLLM's own schemes name (`model_executor/layers/quantization/quark/schemes`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tests.support import modelopt, quantized
from tests.support.quantized import Rounding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["INPUTS", "SAYS", "checkpoint", "config", "tensors"]

_INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": True}
_INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True, "is_dynamic": False}
SAYS: dict[str, dict[str, Any]] = {
    "fp8": {"weight": _FP8, "input_tensors": _FP8},
    "int8": {"weight": _INT8 | {"is_dynamic": False}, "input_tensors": _INT8 | {"is_dynamic": True}},
    "int4": {"weight": _INT4, "input_tensors": None},
    "mxfp4": {"weight": _FP4 | {"is_dynamic": False}, "input_tensors": _FP4 | {"is_dynamic": True}},
}
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
INPUTS = {"fp8": modelopt.INPUTS["FP8"], "int8": BY_TOKEN}  # of the others npu leaves them as they are


def checkpoint(folder: Path, schemes: dict[str, str]) -> Path:
    """Write the demo model with a scheme for the layers that match each pattern; all others stay as they are."""
    named: dict[str, Any] = {}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scheme = next(chosen for pattern, chosen in schemes.items() if re.match(pattern, name))
        named[name] = SAYS[scheme] | {"output_tensors": None, "bias": None}
        stored, exact = tensors(scheme, weight)
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact

    layers = "|".join(schemes)
    said = config(named, quantized.kept(quantized.DEMO, layers))
    inputs = {pattern: INPUTS[scheme] for pattern, scheme in schemes.items() if scheme in INPUTS}
    return quantized.save(folder, write, said, inputs, layers=layers)


def config(layers: dict[str, Any], exclude: list[str]) -> dict[str, Any]:
    """Return what config.json says: of each layer, or pattern of layers, its scheme; of others that they stay."""
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": SAYS["fp8"],
        "layer_quant_config": layers,
        "layer_type_quant_config": {},
        "exclude": exclude,
    }


def tensors(scheme: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One layer as Quark stores it, and what it means."""
    if scheme == "fp8":
        stored, exact = modelopt.tensors("", weight, "FP8")
        return {key.removeprefix("."): tensor for key, tensor in stored.items()}, exact
    if scheme == "mxfp4":
        codes, scales, exact = quantized.mxfp4(weight.float())
        return {"weight": codes, "weight_scale": scales}, exact
    if scheme == "int8":
        scale = weight.float().abs().amax(1) / 127
        codes = (weight.float() / scale[:, None]).round().to(torch.int8)
        zeros = torch.zeros(len(codes), dtype=torch.int8)
        exact = codes.float() * scale[:, None]
        return {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}, exact
    rounded = Rounding(group=32)(weight)
    stored, _ = quantized.awq_tensors("", replace(rounded, q=rounded.q ^ 8))  # signed, in AWQ's order
    return {"weight": stored[".qweight"], "weight_scale": stored[".scales"]}, rounded.exact
