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
            layer = layers[name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")]
            layer.weight.data += config["lora_alpha"] / config["r"] * b @ a
    return result
