"""Reads bitsandbytes checkpoints (NF4, FP4, int8): each matrix is dequantised on the way in, without that package.

vLLM 0.32 has no such reader. Layers are then as those of an unquantised checkpoint. What lies in the files is what
`bitsandbytes.functional.QuantState` packs, and what its layer of 8 bits saves.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from npu_ops.errors import CheckpointError
from npu_ops.layers.quantization.without_settings import ConfigWithoutSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import LoadConfig, ModelConfig

NAME = "npu_bitsandbytes"
_THEIRS = "bitsandbytes"
_FOUR_BITS = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    *(f"quant_state.{_THEIRS}__{kind}" for kind in ("nf4", "fp4")),
)
"""What a matrix of 4 bits has beside it, after `.weight.`."""
_SCALES, _LAYOUT = "SCB", "weight_format"
"""What a matrix of 8 bits has, in the place of `weight`."""
_LARGEST = 127.0
_OF_PACKED = ("auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "runai_streamer")
"""Formats whose loaders would put packed weights into layers; the others load what layers have once it is loaded."""


@register_quantization_config(NAME)
class NpuBitsAndBytesConfig(ConfigWithoutSettings):
    """Takes checkpoints that say they are bitsandbytes'; vLLM's plugin keeps those for which it is asked by name."""

    name = NAME

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """Return this method's name for a checkpoint of bitsandbytes, unless vLLM's plugin is there and asked for."""
        if hf_quant_cfg.get("quant_method") != _THEIRS or user_quant not in (None, NAME, _THEIRS):
            return None
        return None if user_quant == _THEIRS and _THEIRS in QUANTIZATION_METHODS else NAME

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return what an unquantised layer has.

        Raises CheckpointError: another loader is named, which would put packed weights into it.
        """
        if not isinstance(layer, LinearBase):
            return None
        if get_current_vllm_config().load_config.load_format in _OF_PACKED:
            msg = f"bitsandbytes checkpoints are read by the loader {NAME}: pass --load-format {NAME}."
            raise CheckpointError(msg)
        return UnquantizedLinearMethod()


@register_model_loader(NAME)
class BitsAndBytesLoader(DefaultModelLoader):
    """Loads what the default loader loads, and of bitsandbytes' matrices the dequantised values."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Read files as if no loader had been named."""
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        """Yield the weights, those of bitsandbytes in the model's dtype."""
        quiet = DefaultModelLoader(dataclasses.replace(self.load_config, use_tqdm_on_load=False))
        beside = {name: part for name, part in quiet.get_all_weights(model_config, model) if _is_beside(name)}
        for name, weight in super().get_all_weights(model_config, model):
            if not _is_beside(name):
                yield name, dequantised(name, weight, beside, model_config.dtype)


def dequantised(name: str, weight: Tensor, beside: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a matrix of bitsandbytes in `dtype`, and any other weight as it is.

    Args:
        name: of the weight, as the checkpoint has it.
        weight: as the checkpoint has it.
        beside: what belongs to the matrices of the checkpoint, by name.
        dtype: of the model.

    Raises:
        CheckpointError: the matrix of 8 bits lies in an order of GPUs.
    """
    stem = name.removesuffix("weight")
    if (scales := beside.get(f"{stem}{_SCALES}")) is not None:
        if (layout := beside.get(f"{stem}{_LAYOUT}")) is not None and layout.item() != 0:
            msg = (
                f"{name} lies in an order of GPUs, not row by row: save the checkpoint again with bitsandbytes >= 0.45."
            )
            raise CheckpointError(msg)
        return (weight * (scales / _LARGEST)[:, None]).to(dtype)
    parts = {part: beside[f"{name}.{part}"] for part in _FOUR_BITS if f"{name}.{part}" in beside}
    return _of_four_bits(weight, parts).to(dtype) if parts else weight


def _is_beside(name: str) -> bool:
    return name.endswith((f".{_SCALES}", f".{_LAYOUT}", *(f".weight.{part}" for part in _FOUR_BITS)))


def _of_four_bits(packed: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Return the values in float32: two in a byte, the first one high, each of a table and times its block's scale."""
    said = next(json.loads(bytes(part.tolist())) for name, part in parts.items() if name.startswith("quant_state"))
    scales = parts["absmax"]
    if "nested_absmax" in parts:
        outer = parts["nested_absmax"].repeat_interleave(said["nested_blocksize"])[: scales.numel()]
        scales = parts["nested_quant_map"][scales.long()] * outer + said["nested_offset"]
    codes = packed.reshape(-1).view(torch.uint8).int()
    values = parts["quant_map"][torch.stack([codes >> 4, codes & 15], dim=1).reshape(-1)]
    shape = torch.Size(said["shape"])
    scales = scales.repeat_interleave(said["blocksize"])
    return (values[: shape.numel()] * scales[: shape.numel()]).reshape(shape)
