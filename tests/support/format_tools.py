"""Makes quantised checkpoints with the tools of their formats, on the processor:

PYTHON format_tools.py MODEL FOLDER NAME...

Each name of a checkpoint (:data:`MAKERS`) becomes a folder in FOLDER. PYTHON is of an environment that has the tools
(`nox -s format_tools` makes one), so nothing of the workspace is imported here.
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAKERS", "main"]

ROWS, LENGTH, VOCABULARY = 32, 64, 890  # texts by which ranges of activations are found


def main() -> None:
    """Make what is asked for."""
    model, folder, *names = sys.argv[1:]
    for name in names:
        MAKERS[name](Path(model), Path(folder) / name)


def _texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (1, LENGTH), generator=generator) for _ in range(ROWS)]


def _load(model: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options)


def _llm_compressor(model: Path, folder: Path, scheme: str, by: str = "QuantizationModifier") -> None:
    import datasets
    from llmcompressor import oneshot
    from llmcompressor.modifiers import quantization

    rows = [{"input_ids": row[0].tolist(), "attention_mask": [1] * LENGTH} for row in _texts()]
    texts = {"dataset": datasets.Dataset.from_list(rows), "max_seq_length": LENGTH, "num_calibration_samples": ROWS}
    loaded = _load(model)
    recipe = getattr(quantization, by)(targets="Linear", ignore=["lm_head"], scheme=scheme)
    oneshot(model=loaded, recipe=recipe, **({} if scheme in ("FP8_DYNAMIC", "FP8_BLOCK") else texts))
    loaded.save_pretrained(folder, save_compressed=True)


def _modelopt(model: Path, folder: Path, config: str) -> None:
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    loaded = _load(model)
    quantization.quantize(loaded, copy.deepcopy(getattr(quantization, config)), _run)
    with torch.inference_mode():
        export_hf_checkpoint(loaded, export_dir=folder)


def _run(model: torch.nn.Module) -> None:
    for row in _texts():
        model(row)


def _auto_round(model: Path, folder: Path, form: str, symmetric: bool) -> None:
    from auto_round import AutoRound

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"iters": 4, "nsamples": ROWS, "seqlen": LENGTH, "dataset": _texts(), "device_map": "cpu"}
    rounding = AutoRound(_load(model), tokenizer, scheme="W4A16", sym=symmetric, group_size=64, **options)
    rounding.quantize_and_save(output_dir=str(folder / "made"), format=form)
    (made,) = (folder / "made").glob("*/model.safetensors")
    for file in made.parent.iterdir():
        file.rename(folder / file.name)


def _bitsandbytes(model: Path, folder: Path, **options: Any) -> None:
    """Make a checkpoint, and `weights.safetensors` beside it with what its matrices mean to bitsandbytes."""
    from bitsandbytes import functional, nn

    config = transformers.BitsAndBytesConfig(**options)
    loaded = _load(model, quantization_config=config, device_map="cpu")
    loaded.save_pretrained(folder)
    meant = {}
    for name, module in loaded.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear4bit):
            weight.quant_state.dtype = torch.float32
            meant[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, nn.Linear8bitLt):
            codes, scales = (weight.data, weight.SCB) if weight.CB is None else (weight.CB, weight.SCB)
            meant[f"{name}.weight"] = functional.int8_vectorwise_dequant(codes, scales)
    (folder / "meant").mkdir()
    safetensors.torch.save_file(meant, folder / "meant" / "weights.safetensors")


_LLM_COMPRESSOR = ("W8A16", "W4A8", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP8")
_MODELOPT = {
    "FP8": "FP8_DEFAULT_CFG",
    "FP8 by channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "FP8 by block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "MXFP8": "MXFP8_DEFAULT_CFG",
}
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
MAKERS: dict[str, Callable[[Path, Path], None]] = {
    **{f"llm-compressor {name}": functools.partial(_llm_compressor, scheme=name) for name in _LLM_COMPRESSOR},
    "llm-compressor GPTQ W4A16": functools.partial(_llm_compressor, scheme="W4A16", by="GPTQModifier"),
    **{f"ModelOpt {name}": functools.partial(_modelopt, config=config) for name, config in _MODELOPT.items()},
    "AutoRound GPTQ": functools.partial(_auto_round, form="auto_gptq", symmetric=True),
    "AutoRound": functools.partial(_auto_round, form="auto_round", symmetric=True),
    "AutoRound with zero points": functools.partial(_auto_round, form="auto_round", symmetric=False),
    "AutoRound AWQ": functools.partial(_auto_round, form="auto_awq", symmetric=False),
    "bitsandbytes NF4": functools.partial(
        _bitsandbytes, **_FOUR_BITS, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes FP4": functools.partial(_bitsandbytes, **_FOUR_BITS, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": functools.partial(_bitsandbytes, load_in_8bit=True),
}

if __name__ == "__main__":
    main()
