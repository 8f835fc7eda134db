"""Loads GGUF checkpoints (`--load-format gguf`): each tensor is dequantised on the way in, by the package gguf.

vLLM 0.32 has no such loader. Names, and the order of rows where llama.cpp has another, are those of transformers'
reader of GGUF, which is called and not copied. File format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from npu_ops.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3")
"""By their names in GGUF files; Mistral's is llama."""

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")


@register_model_loader("gguf")
class GGUFLoader(DefaultModelLoader):
    """Loads a folder with a model's config.json and tokenizer and one GGUF file, or the parts of one."""

    def download_model(self, model_config: ModelConfig) -> None:
        """See that the files are there; raises CheckpointError."""
        _files(model_config.model)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their names in transformers, in the model's dtype."""
        return weights(model_config.model, model_config.hf_config, model_config.dtype)


def weights(folder: str, config: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder's GGUF file by their names in transformers, one at a time.

    Args:
        folder: of the checkpoint.
        config: transformers' configuration of the model.
        dtype: of what is yielded.

    Raises:
        CheckpointError: there is no file, it holds an architecture that is not read here, or gguf is not installed.
    """
    files = _files(folder)
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = _architecture(files[0], GGUFReader(files[0]))
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.get_text_config().to_dict())
    names = _names(config, processor, architecture)
    for file in files:
        for tensor in GGUFReader(file).tensors:
            yield from ((name, value.to(dtype)) for name, value in _named(tensor, processor, names))


def _files(folder: str) -> list[Path]:
    """Return the GGUF files of a folder in the order of their parts."""
    if importlib.util.find_spec("gguf") is None:
        msg = "GGUF checkpoints are read by the package gguf, which is not installed: pip install gguf."
        raise CheckpointError(msg)
    found = sorted(Path(folder).glob("*.gguf"))
    wholes = {re.sub(r"-\d+-of-\d+$", "", file.stem) for file in found}
    if len(wholes) != 1:
        what = f"has {', '.join(sorted(wholes))}" if wholes else "has none"
        msg = (
            f"--load-format gguf wants a folder with one GGUF file, or the parts of one, and {folder} {what}: name the "
            "folder that has config.json, the tokenizer and the file."
        )
        raise CheckpointError(msg)
    return found


def _architecture(file: Path, reader: Any) -> str:
    architecture: str = reader.fields["general.architecture"].contents()
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        msg = (
            f"{file} holds the architecture {architecture!r}, and npu-ops reads {known}: load its safetensors instead."
        )
        raise CheckpointError(msg)
    return architecture


def _names(config: Any, processor: Any, architecture: str) -> dict[str, str]:
    """Return the names of transformers by those of GGUF."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = config.get_text_config().num_hidden_layers
    found: dict[str, str] = get_gguf_hf_weights_map(model, processor, architecture, layers)
    return found


def _named(tensor: Any, processor: Any, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor of the file is in transformers: nothing, a weight, or a matrix of each expert."""
    import gguf

    if tensor.name not in names and not _EXPERTS.fullmatch(tensor.name):
        return  # what transformers computes, such as the factors of rotary positions
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if experts := _EXPERTS.fullmatch(tensor.name):
        layer, part = experts.groups()
        for number, matrix in enumerate(values):
            yield f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight", torch.from_numpy(matrix.copy())
        return
    made = processor.process(weights=values, name=tensor.name, tensor_key_mapping=names, parsed_parameters={})
    yield names[made.name], torch.from_numpy(made.weights.copy())
