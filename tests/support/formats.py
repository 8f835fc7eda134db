"""Formats of quantised checkpoints, and the kinds of models that each of them was tried on.

``Workshop`` makes the checkpoints and judges what engines say of them by transformers with the dequantised weights, which
rounds activations where the format does. tests/e2e/test_formats.py asks.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tests.support import judges, modelopt, models, multimodal, quantized, truth
from tests.support.quantized import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.judges import Judge

__all__ = ["CASES", "FORMATS", "KINDS", "LAYERS", "REFUSED", "Format", "Workshop", "refusal"]

_MLP = r"(mlp|feed_forward)"
LAYERS = rf".*layers\.\d+\.(shared_transformer\.)?(self_attn\.[qkvo]_proj|{_MLP}\.\w+_proj|{_MLP}\.experts(\.\d+\.\w+_proj)?)$"
"""What is quantised: attention's projections, the MLP's, the experts'; states' and images' layers stay as they are."""


@dataclass(frozen=True)
class Format:
    """Who makes a checkpoint of a model, in a folder; and the engine arguments that it needs."""

    make: Callable[[Path, Path], Path]
    engine: dict[str, Any] = field(default_factory=dict)


_OF_VLLM = r"model(\.layers\.\d+)?\.(qkv_proj|o_proj|feed_forward\.(gate_up|down)_proj)$"
"""Names of vLLM's for the same layers where it has them without those of their parts."""
_NAMED_OTHERWISE = ("jamba", "falcon_h1", "zamba2")


def _compressed(weights: dict[str, Any], form: str, inputs: dict[str, Any] | None = None) -> Format:
    scheme = {"weights": weights, "format": form} | ({"input_activations": inputs} if inputs else {})

    def make(folder: Path, model: Path) -> Path:
        kind = json.loads((model / "config.json").read_text())["model_type"]
        # whose layers vLLM asks for by other names, which a pattern of them does not match
        return quantized.compressed(folder, {LAYERS: scheme}, model, names_the_others=kind in _NAMED_OTHERWISE)

    return Format(make)


_INTEGERS: dict[str, Any] = {"type": "int", "symmetric": True}
_FLOATS: dict[str, Any] = {"type": "float", "symmetric": True}
_BY_TOKEN: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FOUR: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32, **_INTEGERS}
_NONE = r"(?!)"
_SCALES_OF_8 = {"scale_dtype": "torch.uint8"}
FORMATS: dict[str, Format] = {
    "AWQ": Format(lambda folder, model: quantized.awq(folder, Rounding(group=32, symmetric=False), model, LAYERS)),
    "GPTQ": Format(lambda folder, model: quantized.gptq(folder, Rounding(group=32), model, LAYERS)),
    "AutoRound": Format(
        lambda folder, model: quantized.auto_round(folder, Rounding(group=32, symmetric=False), {}, model, LAYERS)
    ),
    "W4A16": _compressed(_FOUR, "pack-quantized"),
    "W8A16": _compressed({"num_bits": 8, "strategy": "channel", **_INTEGERS}, "pack-quantized"),
    "W4A8": _compressed(_FOUR, "int-quantized", _BY_TOKEN | _INTEGERS),
    "W8A8": _compressed({"num_bits": 8, "strategy": "channel", **_INTEGERS}, "int-quantized", _BY_TOKEN | _INTEGERS),
    "fp8": _compressed({"num_bits": 8, "strategy": "channel", **_FLOATS}, "float-quantized", _BY_TOKEN | _FLOATS),
    "fp8, blocks": Format(lambda folder, model: quantized.fp8_blocks(folder, model, LAYERS)),
    "fp8, online": Format(
        lambda folder, model: quantized.online(folder, _NONE, LAYERS, _NONE, model, LAYERS),
        {
            "quantization": "online",
            "quantization_config": {"targets": {f"re:({LAYERS}|{_OF_VLLM})": "fp8_per_channel"}},
        },
    ),
    "MXFP8": _compressed(
        {"num_bits": 8, "strategy": "group", "group_size": 32, **_FLOATS} | _SCALES_OF_8, "mxfp8-quantized"
    ),
    "MXFP4": _compressed({"num_bits": 4, "strategy": "group", "group_size": 32, **_FLOATS}, "mxfp4-pack-quantized"),
    "NVFP4": _compressed(
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, **_FLOATS}
        | {"scale_dtype": "torch.float8_e4m3fn"},
        "nvfp4-pack-quantized",
    ),
} | {
    f"ModelOpt {form}": Format(
        lambda folder, model, form=form: modelopt.checkpoint(folder, form.upper(), model, LAYERS)  # type: ignore[misc]
    )
    for form in ("fp8", "NVFP4", "MXFP8")
}
"""Names are those of docs/reference/formats.md."""

KINDS: dict[str, Callable[[Path], Path]] = {
    "dense": models.tiny_llama,
    "sliding window": models.tiny_gemma3,
    # vLLM does not know which layers of Qwen3-MoE are dense when GPTQ asks
    "experts": lambda folder: models.tiny_qwen3_moe(folder, mlp_only_layers=[]),
    "latent attention": models.tiny_deepseek_v2,
    # four heads of keys, so that all projections have whole blocks of 128
    "states": lambda folder: models.tiny_granite_hybrid(folder, num_key_value_heads=4),
    # those that have their own code in vLLM; with groups of heads that make whole blocks
    "Jamba": lambda folder: models.tiny_jamba(folder, num_key_value_heads=4),
    "Falcon-H1": lambda folder: models.tiny_falcon_h1(folder, num_key_value_heads=4),
    # calmer: of wider weights that share a block twice, activations rounded to fp8 make chaos in transformers, too
    "Zamba 2": lambda folder: models.tiny_zamba2(folder, initializer_range=0.05),
    "images": lambda folder: multimodal.tiny_qwen2_5_vl(folder, num_key_value_heads=4),
}
REFUSED: dict[tuple[str, str], str] = {}
"""A format and a kind -> what the engine says at start that refuses them."""

CASES = [(form, kind) for form in FORMATS for kind in KINDS]
_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 8],
}
_SAMPLING = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}
_READING: dict[str, Any] = {"prompts": models.prompt_token_ids([90, 1, 7, 17, 40, 5, 33, 64])}
_SEEING: dict[str, Any] = {
    "prompts": [
        [1, 90 + number, 4, multimodal.IMAGE_TOKEN, 5, 20 + number] if number % 2 else [1, *range(20, 30 + 7 * number)]
        for number in range(8)
    ],
    "seen": [number if number % 2 else None for number in range(8)],
}


def refusal(form: str, kind: str) -> str | None:
    """Return what an engine says that refuses this at start; None: it runs."""
    return REFUSED.get((form, kind))


class Workshop:
    """Makes checkpoints in a folder, once each, and judges what engines say of them."""

    def __init__(self, folder: Path) -> None:
        """Begin with nothing made."""
        self._folder = folder

    def scenario(self, form: str, kind: str) -> dict[str, Any]:
        """Return what ``tests.support.engine_run`` runs."""
        engine = _ENGINE | FORMATS[form].engine | {"model": str(self._checkpoint(form, kind))}
        engine["skip_tokenizer_init"] = kind != "images"
        return {"engine": engine, "rounds": [_asked(kind) | {"sampling": _SAMPLING}]}

    def errors(self, form: str, kind: str, outputs: list[dict[str, Any]]) -> truth.Errors:
        """Return how far an engine's logprobs are from the truth, and transformers' own in the engine's dtype."""
        exact, rounded = (self._judge(form, kind, dtype) for dtype in (torch.float32, torch.bfloat16))
        return truth.of_logprobs(exact, rounded, judges.requests(_asked(kind)), outputs)

    def _judge(self, form: str, kind: str, dtype: torch.dtype) -> Judge:
        folder = self._checkpoint(form, kind)
        model = quantized.exact_model(folder, dtype)
        return judges.of_seeing(model, folder) if kind == "images" else judges.of_model(model)

    def _checkpoint(self, form: str, kind: str) -> Path:
        return self._once(f"{kind} {form}", lambda folder: FORMATS[form].make(folder, self._model(kind)))

    def _model(self, kind: str) -> Path:
        return self._once(kind, functools.partial(_make, kind))

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        folder = self._folder / re.sub(r"\W+", "-", name)
        if not folder.exists():
            make(folder)
        return folder


def _make(kind: str, folder: Path) -> None:
    """Make a model; what is not quantised has bfloat16's values, so that the truth of it is the engine's."""
    import safetensors.torch

    KINDS[kind](folder)
    file = folder / "model.safetensors"
    weights = {name: value.bfloat16().float() for name, value in safetensors.torch.load_file(file).items()}
    if kind == "images":  # an image in an answer would have no picture
        weights["lm_head.weight"][multimodal.IMAGE_TOKEN] = 0
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def _asked(kind: str) -> dict[str, Any]:
    return _SEEING if kind == "images" else _READING
