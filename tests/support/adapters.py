"""Makers of small random LoRA adapters, and what transformers says with one merged into the model."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

import safetensors.torch
import torch

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = "base_model.model."
_EXPERTS_ROWS_COLUMNS = 3
_STACKED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def adapter(folder: Path, model: torch.nn.Module, modules: list[str], rank: int, seed: int) -> Path:
    """Write an adapter of the linear layers whose names end with one of `modules`, in peft's format."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if name.endswith(tuple(modules)):
            rows, columns = layer.weight.shape
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    return _written(folder, tensors, modules, rank)


def adapter_of_experts(folder: Path, model: torch.nn.Module, rank: int, seed: int, shared: bool = False) -> Path:
    """Write an adapter of all experts, each with matrices of its own for gate, up and down, in peft's format.

    `shared`: in vLLM's stacked format, where all have the same A of gate and up, and the same B of down.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "gate_up_proj") or layer.gate_up_proj.dim() != _EXPERTS_ROWS_COLUMNS:
            continue
        inner, hidden = layer.down_proj.shape[-1], layer.down_proj.shape[-2]
        for part, (rows, columns) in {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }.items():
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                one = shared and (part == "down_proj") == (side == "B")
                matrices = torch.randn(1 if one else len(layer.down_proj), *shape, generator=generator) * 0.1
                if shared:
                    tensors[f"{_PREFIX}{name}.{_STACKED[part]}.lora_{side}.weight"] = matrices
                    continue
                for expert, matrix in enumerate(matrices):
                    tensors[f"{_PREFIX}{name}.{expert}.{part}.lora_{side}.weight"] = matrix
    return _written(folder, tensors, ["gate_proj", "up_proj", "down_proj"], rank)


def _written(folder: Path, tensors: dict[str, torch.Tensor], modules: list[str], rank: int) -> Path:
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": modules,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return a copy of the model with an adapter's products added to its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    result = copy.deepcopy(model)
    layers = dict(result.named_modules())
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            _weight(layers, target).data.add_(config["lora_alpha"] / config["r"] * b @ a)
    return result


def _weight(layers: dict[str, torch.nn.Module], target: str) -> torch.Tensor:
    """Return the weight of a layer, or of one expert's or all experts' part of it."""
    if target in layers:
        return layers[target].weight
    experts, part = target.rsplit(".", 1)
    which: int | slice = slice(None)
    if experts not in layers or part not in _STACKED.values():
        experts, number = experts.rsplit(".", 1)
        which = int(number)
    if part in ("down_proj", "w2"):
        return layers[experts].down_proj[which]
    gate, up = layers[experts].gate_up_proj[which].chunk(2, dim=-2)
    return gate if part in ("gate_proj", "w1") else up
