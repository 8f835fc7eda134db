"""Makes checkpoints as NVIDIA's ModelOpt writes them: fp8 by tensor, NVFP4, MXFP8, or some of each; what they mean lies in `exact`.

The layouts are those that vLLM documents for it (`model_executor/layers/quantization/modelopt.py`): the names of
compressed-tensors' formats are others, and NVFP4's scale of a whole matrix is the inverse of the one there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from tests.support import quantized

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["INPUTS", "checkpoint", "meant", "mixed", "says", "tensors"]

INPUTS: dict[str, dict[str, Any] | None] = {
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    "NVFP4": None,  # npu leaves activations as they are, whatever the checkpoint says
    "MXFP8": None,
}
STATIC_SCALE = 8 / 448  # of inputs in fp8
_FLOATS: dict[str, Any] = {"type": "float", "symmetric": True}
_SCHEMES: dict[str, dict[str, Any]] = {
    "NVFP4": {
        "weights": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        "format": "nvfp4-pack-quantized",
    },
    "MXFP8": {
        "weights": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        "format": "mxfp8-quantized",
    },
}


def checkpoint(folder: Path, algorithm: str, model: Path = quantized.DEMO, layers: str = quantized.ALL) -> Path:
    """Write a model whose matching layers are quantised by FP8, NVFP4 or MXFP8."""
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "ignore": [*quantized.kept(model, layers), "lm_head"],
    }
    inputs = INPUTS[algorithm]
    noted = {} if inputs is None else {layers: inputs}
    write = lambda name, weight: tensors(name, weight, algorithm)  # noqa: E731
    return quantized.save(folder, write, config, noted, model=model, layers=layers)


def mixed(folder: Path, algorithms: dict[str, str]) -> Path:
    """Write the demo model with an algorithm for the layers that match each pattern; all others stay as they are."""
    quantised: dict[str, Any] = {}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        algorithm = next(chosen for pattern, chosen in algorithms.items() if re.match(pattern, name))
        quantised[name] = says(algorithm)
        return tensors(name, weight, algorithm)

    noted = {pattern: INPUTS[algorithm] for pattern, algorithm in algorithms.items() if INPUTS[algorithm]}
    layers = "|".join(algorithms)
    return quantized.save(folder, write, config | {"quantized_layers": quantised}, noted, layers=layers)


def says(algorithm: str) -> dict[str, Any]:
    """What quantized_layers says of a layer."""
    sizes = {"NVFP4": 16, "MXFP8": 32}
    return {"quant_algo": algorithm} | ({"group_size": sizes[algorithm]} if algorithm in sizes else {})


def tensors(name: str, weight: Tensor, algorithm: str) -> tuple[dict[str, Tensor], Tensor]:
    """One layer as ModelOpt stores it, and what it means."""
    if algorithm == "FP8":
        scale = torch.tensor(quantized.WIDEST / 448)  # one for all: vLLM would round what it fuses again
        assert weight.abs().max() <= quantized.WIDEST
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(STATIC_SCALE)}
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, codes.float() * scale
    said = _SCHEMES[algorithm]
    scheme = QuantizationScheme(targets=["Linear"], weights=_FLOATS | said["weights"], format=said["format"])
    scale, zero = quantized.weight_qparams(weight.float(), scheme.weights)
    state = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
    if algorithm == "NVFP4":
        state["weight_global_scale"] = quantized.NVFP4_RANGE / torch.tensor([quantized.WIDEST])
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    state = compressor.compress(state, scheme)
    exact = quantized.decompressed(state, scheme)
    stored = {"weight": state.get("weight_packed", state.get("weight")), "weight_scale": state["weight_scale"]}
    if algorithm == "NVFP4":
        stored["weight_scale_2"] = 1 / state["weight_global_scale"][0].float()
        stored["input_scale"] = torch.tensor(8.0 / quantized.NVFP4_RANGE)
    return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact


def meant(parts: dict[str, Tensor], algorithm: str) -> Tensor:
    """Return what the stored parts of one layer mean."""
    if algorithm == "FP8":
        return parts["weight"].float() * parts["weight_scale"]
    said = _SCHEMES[algorithm]
    scheme = QuantizationScheme(targets=["Linear"], weights=_FLOATS | said["weights"], format=said["format"])
    state = {"weight": parts["weight"], "weight_scale": parts["weight_scale"]}
    if algorithm == "NVFP4":
        state = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"]}
        state["weight_global_scale"] = 1 / parts["weight_scale_2"].reshape(1)
    return quantized.decompressed(state, scheme)
