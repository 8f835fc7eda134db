"""Writes GGUF files of small models as llama.cpp's converter does, and the same rounded weights for transformers."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write"]

KINDS = ("Q8_0", "Q4_0", "Q5_1", "Q4_1", "BF16", "F16")
"""What matrices are rounded to, in turn."""
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MATRIX = 2


def write(model: Path, folder: Path, architecture: str) -> Path:
    """Write a checkpoint's config and a GGUF file of its weights into a folder; `folder`/exact has them as safetensors."""
    exact = folder / "exact"
    exact.mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
        shutil.copy(file, exact)
    weights, heads = load_file(model / "model.safetensors"), _heads(model)
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    rounded: dict[str, torch.Tensor] = {}
    for number, (ours, theirs) in enumerate(_names(weights, architecture).items()):
        values = torch.stack([weights[name] for name in theirs]) if "_exps." in ours else weights[theirs[0]]
        kind = gguf.GGMLQuantizationType[KINDS[number % len(KINDS)] if values.dim() >= _MATRIX else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(_order(values.numpy(), ours, architecture, heads)), kind)
        writer.add_tensor(ours, data, raw_dtype=kind)
        # what a reader gets, in the order that transformers has
        back = gguf.quants.dequantize(data, kind).reshape(values.shape)
        read = torch.from_numpy(_order(back, ours, architecture, heads, undo=True).copy())
        rounded |= {name: part.clone() for name, part in zip(theirs, read if "_exps." in ours else [read], strict=True)}
    save_file(rounded, exact / "model.safetensors", metadata={"format": "pt"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _names(weights: dict[str, torch.Tensor], architecture: str) -> dict[str, list[str]]:
    """Return which weights, in the order of experts, each tensor of the file is."""
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    layers = 1 + max(int(found[1]) for name in weights if (found := re.search(r"layers\.(\d+)\.", name)))
    names, of_file = gguf.get_tensor_name_map(kind, layers), {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        if found := _EXPERT.fullmatch(name):
            of_file.setdefault(f"blk.{found[1]}.ffn_{found[3]}_exps.weight", []).append(name)
        else:
            stem, _, suffix = name.rpartition(".")
            of_file[f"{names.get_name(stem)}.{suffix}"] = [name]
    return of_file


def _heads(model: Path) -> dict[str, int]:
    config = transformers.AutoConfig.from_pretrained(model)
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def _order(values: np.ndarray, name: str, architecture: str, heads: dict[str, int], undo: bool = False) -> np.ndarray:
    """Put rows as llama.cpp has them: halves of a Llama's heads interleaved, norms of Gemma with the one added."""
    kind = name.split(".")[-2]
    if architecture == "llama" and kind in heads:
        half = len(values) // heads[kind] // 2
        shape = (heads[kind], *((half, 2) if undo else (2, half)), values.shape[1])
        return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and kind.endswith("norm"):
        return values - 1 if undo else values + 1
    return values
