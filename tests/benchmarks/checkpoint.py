"""Owns the checkpoint that vLLM's engines load: the shape of a model, random weights, the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def write_shape(folder: Path, shape: dict[str, Any]) -> None:
    """Write a configuration alone, for ``load_format="dummy"``: vLLM makes the weights."""
    configuration(shape).save_pretrained(folder)


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint of random bfloat16 weights, with the demo model's tokenizer, unless it is there."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    import transformers

    from npu_platform.demo import MODEL

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copy(file, folder)


def configuration(shape: dict[str, Any]) -> Any:
    """Return transformers' configuration of a shape."""
    import transformers

    return transformers.AutoConfig.for_model(**shape)
