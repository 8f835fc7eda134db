"""Features of vLLM that change how tokens are computed: what asks for each, which go together, and engines with many.

A row chooses one feature in each dimension; the first is that of the eager baseline, which every other goes with.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support import drafters, models, multimodal, pairs, quantized
from tests.support.adapters import adapter
from tests.support.transformers_reference import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.pairs import Row

__all__ = [
    "APART",
    "CONTENT",
    "DIMENSIONS",
    "Apart",
    "Feature",
    "Workshop",
    "allowed",
    "baseline",
    "name_of",
    "refused",
    "rows",
    "those_beside_the_baselines",
]


@dataclass(frozen=True)
class Feature:
    """What asks for a feature: engine arguments, in which "{folder}" names are of :class:`Workshop`, and variables."""

    engine: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def _graphs(mode: str) -> Feature:
    return Feature({"compilation_config": {"cudagraph_mode": mode}, "enforce_eager": False})


def _drafts(method: str, **more: Any) -> Feature:
    return Feature({"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}})


def _ranks(kind: str) -> Feature:
    environ = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return Feature({f"{kind}_parallel_size": 2}, environ)


_TIER = {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False}
_OFFLOAD = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": _TIER}

DIMENSIONS: dict[str, dict[str, Feature]] = {
    "model": {
        "dense": Feature(),
        "sliding window": Feature(),
        "experts": Feature(),
        "latent attention": Feature(),
        "states": Feature(),
        "images": Feature(),
    },
    "weights": {
        "weights as they are": Feature(),
        "W8A8": Feature(),
        "W4A16": Feature(),
        "W8A8 in fp8": Feature(),
    },
    "cache": {
        "cache as it is": Feature(),
        "fp8 cache": Feature({"kv_cache_dtype": "fp8"}),
        "int8 cache": Feature({"kv_cache_dtype": "int8_per_token_head"}),
    },
    "adapters": {
        "no adapters": Feature(),
        "LoRA": Feature({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    },
    "graphs": {
        "eager": Feature(),
        "FULL_DECODE_ONLY": _graphs("FULL_DECODE_ONLY"),
        "FULL": _graphs("FULL"),
        "PIECEWISE": _graphs("PIECEWISE"),
        "FULL_AND_PIECEWISE": _graphs("FULL_AND_PIECEWISE"),
    },
    "compilation": {
        "not compiled": Feature(),
        "compiled": Feature({"compilation_config": {"mode": 3, "backend": "eager"}, "enforce_eager": False}),
    },
    "prefixes": {"no prefix caching": Feature(), "prefix caching": Feature({"enable_prefix_caching": True})},
    "prompts": {
        "whole prompts": Feature(),
        "chunked prefill": Feature({"enable_chunked_prefill": True, "max_num_batched_tokens": 64}),
    },
    "scheduling": {"synchronous": Feature(), "async scheduling": Feature({"async_scheduling": True})},
    "speculation": {
        "no drafts": Feature(),
        "n-gram": _drafts("ngram", prompt_lookup_max=3, prompt_lookup_min=1),
        "draft model": _drafts("draft_model", model="{drafter}"),
        "EAGLE": _drafts("eagle", model="{head}"),
    },
    "ranks": {"one device": Feature(), "TP 2": _ranks("tensor"), "PP 2": _ranks("pipeline")},
    "tiers": {"no connector": Feature(), "KV offload": Feature({"kv_transfer_config": _OFFLOAD})},
    "memory": {"always awake": Feature(), "sleep and wake": Feature({"enable_sleep_mode": True})},
    "order of sums": {
        "fastest": Feature(),
        "batch-invariant": Feature(environ={"VLLM_BATCH_INVARIANT": "1"}),
    },
}
CONTENT = ("model", "weights", "cache", "adapters")
"""Dimensions that change what an engine says: a row's baseline has the same features there, and no others."""


@dataclass(frozen=True)
class Apart:
    """Features of which no engine has all at once, and why; `said`: how vLLM or npu refuses it, a regular expression."""

    features: tuple[frozenset[str], ...]
    why: str
    said: str = ""

    def forbids(self, row: Row) -> bool:
        """Say whether a row, or a part of one, has such features."""
        chosen = set(row.values())
        return all(some & chosen for some in self.features)


def _apart(*features: str, why: str, said: str = "") -> Apart:
    """Make the entry of features by their names; "|" between those of which each is meant."""
    return Apart(tuple(frozenset(some.split("|")) for some in features), why, said)


_ROUNDED = "W8A8|W4A16|W8A8 in fp8"
_DRAFTED = "n-gram|draft model|EAGLE"
APART: tuple[Apart, ...] = (
    _apart(
        "async scheduling",
        "n-gram",
        why="vLLM schedules ahead with drafts of a model or a head only",
        said="async scheduling is only supported with EAGLE/MTP/Draft Model",
    ),
    _apart(
        "states",
        "prefix caching",
        "whole prompts",
        why="vLLM cuts prompts where it keeps states of them",
        said="Chunked prefill is required for mamba cache mode 'align'",
    ),
    _apart(
        "states",
        "KV offload",
        "no prefix caching|whole prompts",
        why="blocks of states and of attention are alike only where prefixes are cached",
        said="need --enable-prefix-caching to align block sizes",
    ),
    _apart(
        "PP 2",
        _DRAFTED,
        why="vLLM drafts beside stages by EAGLE-3 and DeepSeek's head alone",
        said="leave out --speculative-config or --pipeline-parallel-size",
    ),
    _apart(
        "PP 2",
        "states",
        why="vLLM's loader of Granite 4 asks each stage for all layers",
        said="asks each stage for all layers: leave out --pipeline-parallel-size",
    ),
    _apart(
        "experts|latent attention",
        "LoRA",
        _ROUNDED,
        why="adapters have no kernels for quantised experts, which DeepSeek has as well",
        said="Adapters have no npu kernels for quantised experts: leave out --enable-lora",
    ),
    _apart(
        "latent attention",
        "int8 cache",
        why="latents have no scale by head",
        said="NPU_MLA has no KV cache of the kind int8_per_token_head",
    ),
)


def allowed(row: Row) -> bool:
    """Say whether the features of a row, or of a part of one, go together."""
    return not any(apart.forbids(row) for apart in APART)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return engines with one feature each beside the baseline's, and some in which every two that go together do so."""
    dimensions = {name: list(features) for name, features in DIMENSIONS.items()}
    plain = {name: names[0] for name, names in dimensions.items()}
    alone = [plain | {name: one} for name, names in dimensions.items() if name not in CONTENT for one in names[1:]]
    return tuple(pairs.rows(dimensions, allowed, alone))


def those_beside_the_baselines() -> list[str]:
    """Return the names of all features, without those that only say that there is none."""
    return [one for name, features in DIMENSIONS.items() for one in [*features][name != "model" :]]


def baseline(row: Row) -> Row:
    """Return the row of the eager engine that says what this one is to say."""
    return {name: row[name] if name in CONTENT else next(iter(DIMENSIONS[name])) for name in DIMENSIONS}


def refused(apart: Apart) -> Row:
    """Return an engine with features that do not go together, and that nothing else keeps from going together."""
    kinds = {name: kind for kind, names in DIMENSIONS.items() for name in names}
    plain = {kind: next(iter(names)) for kind, names in DIMENSIONS.items()}
    tried = [plain | {kinds[name]: name for name in some} for some in itertools.product(*map(sorted, apart.features))]
    return next(row for row in tried if [one for one in APART if one.forbids(row)] == [apart])


def name_of(row: Row) -> str:
    """Return the features of a row beside those of a plain eager engine, for people and pytest."""
    chosen = [value for name, value in row.items() if value != next(iter(DIMENSIONS[name]))]
    return ", ".join([row["model"], *chosen[row["model"] != "dense" :]])


class Workshop:
    """Makes in a folder, once each, the checkpoints, heads and adapters that rows ask for, and what rows are asked."""

    def __init__(self, folder: Path) -> None:
        """Begin with nothing made."""
        self._folder = folder

    def engine(self, row: Row, dtype: str) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM`` for a row."""
        arguments: dict[str, Any] = dict(_ENGINE)
        for name, chosen in row.items():
            asked = DIMENSIONS[name][chosen].engine
            compilation = arguments.get("compilation_config", {}) | asked.get("compilation_config", {})
            arguments |= asked | ({"compilation_config": compilation} if compilation else {})
        if arguments["enforce_eager"]:
            arguments["cudagraph_capture_sizes"] = None
        elif row["graphs"] == "eager":
            arguments["compilation_config"] |= {"cudagraph_mode": "NONE"}
        drafter = self.checkpoint(row["model"])
        text = json.dumps(arguments).replace("{drafter}", str(drafter))
        if "{head}" in text:
            head = self._once(f"head {row['model']}", lambda folder: drafters.eagle_beside(folder, drafter))
            text = text.replace("{head}", str(head))
        return json.loads(text) | {"model": str(self.checkpoint(row["model"], row["weights"])), "dtype": dtype}

    def environ(self, row: Row) -> dict[str, str]:
        """Return the variables of a row's process."""
        found = {"VLLM_CACHE_ROOT": str(self._folder / "cache")}
        for name, chosen in row.items():
            found |= DIMENSIONS[name][chosen].environ
        return found

    def rounds(self, row: Row) -> list[dict[str, Any]]:
        """Return what a row is asked: all kinds of requests in a batch, and once more with longer prompts.

        Between them one more, since an engine that nobody asks does not look whether its copies to a tier are done, and
        vLLM does not let it sleep before.
        """
        asked = self._asked(row)
        short = {"prompts": [[30]], "sampling": _GREEDY}
        longer = asked | {"prompts": [[*prompt, 21, 22, 23] for prompt in asked["prompts"]]}
        calls = [["reset_prefix_cache", {}]] if row["tiers"] == "KV offload" else []
        if row["memory"] == "sleep and wake":
            calls += [["sleep", {"level": 1}], ["wake_up", {}]]
        return [asked, short, {"calls": calls}, longer]

    def checkpoint(self, model: str, weights: str = "weights as they are") -> Path:
        """Return the folder of a model with weights of that kind."""
        plain = self._once(model, _MODELS[model])
        if weights not in _SCHEMES:
            return plain
        scheme = {_LAYERS: _SCHEMES[weights]}
        return self._once(f"{model} {weights}", lambda folder: quantized.compressed(folder, scheme, plain))

    def _asked(self, row: Row) -> dict[str, Any]:
        seeing = row["model"] == "images"
        prompts = _SEEING if seeing else _READING
        word = "t" if seeing else "w"
        structured = {"structured_outputs": {"regex": f"({word}[1-4][0-9]*)+"}}
        kinds: list[dict[str, Any]] = [{}, {}, _PENALTIES, structured] * 2
        kinds[1] = {"allowed_token_ids": prompts[1]}  # so that n-grams are found whatever the model says
        asked: dict[str, Any] = {"prompts": prompts, "sampling": [_GREEDY | kind for kind in kinds]}
        if seeing:
            asked["seen"] = _SEEN
        if row["adapters"] == "LoRA":
            made = self._once(f"adapter {row['model']}", lambda folder: self._adapter(folder, row["model"]))
            asked["lora"] = [str(made) if number in _ADAPTED else None for number in range(len(prompts))]
        return asked

    def _adapter(self, folder: Path, model: str) -> Path:
        return adapter(folder, _loaded(self.checkpoint(model)), list(_ADAPTED_LAYERS), 8, seed=1)

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        folder = self._folder / hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:8]
        if not folder.exists():
            make(folder)
        return folder


_ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 48 << 20,
    "cudagraph_capture_sizes": [1, 8, 32],
    "logprobs_mode": "processed_logprobs",
    "skip_tokenizer_init": False,
}
_GREEDY = {"temperature": 0.0, "max_tokens": 8, "logprobs": 4}
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
_READING = [prompt * 3 for prompt in models.prompt_token_ids([60, 17, 1, 12, 43, 21, 5, 11], seed=3)]
_SEEN = [0, 2, None, None, 1, None, 3, None]
_TEXT = [20 + place for place in range(90)]
_SEEING = [
    [1, 30 + number, 4, multimodal.IMAGE_TOKEN, 5, 20 + number]
    if seen is not None
    else [1, *_TEXT[: 11 * number + 1] * 2]
    for number, seen in enumerate(_SEEN)
]
_ADAPTED = (1, 3, 4)  # which of the prompts go with the adapter
_ADAPTED_LAYERS = ("q_proj", "v_proj", "o_proj")

_MODELS: dict[str, Callable[[Path], Any]] = {
    "dense": lambda folder: models.with_tokenizer(models.tiny_llama(folder)),
    "sliding window": lambda folder: models.with_tokenizer(models.tiny_gemma3(folder)),
    "experts": lambda folder: models.with_tokenizer(models.tiny_qwen3_moe(folder)),
    "latent attention": lambda folder: models.with_tokenizer(models.tiny_deepseek_v2(folder)),
    "states": lambda folder: models.with_tokenizer(models.tiny_granite_hybrid(folder)),
    "images": multimodal.tiny_qwen2_5_vl,
}
_LAYERS = r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|mlp\.experts.*)"
_INTEGERS: dict[str, Any] = {"type": "int", "symmetric": True}
_FLOATS: dict[str, Any] = {"type": "float", "symmetric": True}
_SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8": {
        "weights": {"num_bits": 8, "strategy": "channel", **_INTEGERS},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, **_INTEGERS},
        "format": "int-quantized",
    },
    "W8A8 in fp8": {
        "weights": {"num_bits": 8, "strategy": "channel", **_FLOATS},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True, **_FLOATS},
        "format": "float-quantized",
    },
    "W4A16": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, **_INTEGERS},
        "format": "pack-quantized",
    },
}


def _loaded(folder: Path) -> Any:
    import transformers

    config = json.loads((folder / "config.json").read_text())
    if "vision_config" in config:
        return transformers.AutoModelForImageTextToText.from_pretrained(folder)
    return load(folder)
