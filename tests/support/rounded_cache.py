"""transformers' KV cache with keys and values rounded to codes, as vLLM's quantised caches hold them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

__all__ = ["ROUNDINGS", "rounded_cache", "with_cache_scales"]


def rounded_cache(
    name: str, exact: Collection[int] = (), scales: Sequence[tuple[float, float]] = ()
) -> transformers.Cache:
    """Return an empty cache for one forward of a model, of the codes that vLLM's ``kv_cache_dtype`` names so.

    `exact`: layers that keep the model's dtype; `scales`: those of each layer's keys and values, else one.
    """
    return _RoundedCache(ROUNDINGS[name], exact, scales)


def with_cache_scales(folder: Path, source: Path, scales: Sequence[tuple[float, float]]) -> Path:
    """Write a checkpoint of the model in `source`, unquantised, that wants a cache of e4m3 with these scales."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(("k_scale", "v_scale"), pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    codes = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": codes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class _RoundedCache(transformers.DynamicCache):
    def __init__(
        self,
        rounds: Callable[[torch.Tensor], torch.Tensor],
        exact: Collection[int],
        scales: Sequence[tuple[float, float]],
    ) -> None:
        super().__init__()
        self._rounds, self._exact, self._scales = rounds, exact, scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep and return what the codes of [batch, heads, tokens, dim] mean."""
        if layer_idx in self._exact:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        both = (key_states, value_states)
        if self._scales:
            pair = self._scales[layer_idx]
            both = tuple(self._rounds(x / scale) * scale for x, scale in zip(both, pair, strict=True))
        else:
            both = tuple(map(self._rounds, both))
        return super().update(*both, layer_idx, *args, **kwargs)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """e4m3; a checkpoint without scales has scales of one."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Integers of eight bits with a scale for each token and head."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return ((wide / scale).round() * scale).to(x.dtype)


ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"fp8": _fp8, "int8_per_token_head": _int8}
