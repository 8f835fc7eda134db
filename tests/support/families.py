"""Every family of models that the tests serve: how one is made, what it is asked, and who judges what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import judges, models, multimodal
from tests.support.adapters import adapter
from tests.support.transformers_reference import load
from tests.support.truth import Errors, of_embeddings, of_logprobs

__all__ = ["BY_TRITON", "FAMILIES", "Family"]

NEW = 16
SAMPLING = {"temperature": 0.0, "max_tokens": NEW, "logprobs": 1}
# Of less than a block and of more than a chunk and a window; all of them together, so that few are decoded alone.
TEXT = models.prompt_token_ids([300, 1, 17, 40, 129, 64, 5, 200], seed=3)
SEEN: dict[str, Any] = {
    "prompts": [[1, 4, multimodal.IMAGE_TOKEN, 5, 20], [1, 7, 4, multimodal.IMAGE_TOKEN, 5, 20, 30], [1, 20, 30]] * 2,
    "seen": [0, 2, None, 1, 3, None],
}
HEARD: dict[str, Any] = {"prompts": [[257], [257, 258], [257, 258, 259], [257, 258, 259, 264]], "heard": [0, 1, 2, 3]}
ENCODED = models.prompt_token_ids([1, 2, 33, 100, 300])


def _text(_: Path) -> dict[str, Any]:
    return {"prompts": TEXT}


@dataclass(frozen=True)
class Family:
    """A kind of model; `asked` writes what requests need beside the checkpoint and returns a round without sampling."""

    make: Callable[[Path], Path]
    judge: Callable[[Path, torch.dtype], Any] = judges.of_text
    asked: Callable[[Path], dict[str, Any]] = _text
    engine: dict[str, Any] = field(default_factory=dict)
    chooses: bool = False  # among experts

    @property
    def embeds(self) -> bool:
        """Say whether the answers are embeddings."""
        return self.judge is judges.embedder

    def round(self, folder: Path) -> dict[str, Any]:
        """Return the round that asks the model in `folder`."""
        return self.asked(folder) | ({} if self.embeds else {"sampling": SAMPLING})

    def assert_true(
        self, folder: Path, dtype: torch.dtype, asked: dict[str, Any], outputs: list[dict[str, Any]]
    ) -> None:
        """Assert that an engine's outputs of a round are as near to float32 as transformers' in its dtype.

        Where nothing is wrong, both errors are noise of the same size: measured, 0.4 to 1.3 times.
        """
        errors = self._errors(folder, dtype, asked, outputs)
        (errors.assert_most_within if self.chooses else errors.assert_within)(1.5)

    def _errors(self, folder: Path, dtype: torch.dtype, asked: dict[str, Any], outputs: list[dict[str, Any]]) -> Errors:
        exact, rounded = (self.judge(folder, kind) for kind in (torch.float32, dtype))
        measure = of_embeddings if self.embeds else of_logprobs
        return measure(exact, rounded, judges.requests(asked), outputs)


def _two_adapters_and_none(folder: Path) -> dict[str, Any]:
    model = load(folder)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wide, narrow = folder / "wide", folder / "narrow"
    if not wide.exists():
        adapter(wide, model, projections, 16, seed=1)
        adapter(narrow, model, ["q_proj", "v_proj"], 4, seed=2)
    return {"prompts": TEXT[:6], "lora": [str(wide), str(narrow), None] * 2}


_SMALL: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "cudagraph_capture_sizes": [8]}
_TEXT = _SMALL | {"max_model_len": 512, "max_num_batched_tokens": 256}
_LORA = _TEXT | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
_SEEING = _SMALL | {"max_model_len": 256, "skip_tokenizer_init": False}
_HEARING = _SEEING | {"max_model_len": 64, "max_num_batched_tokens": 1600}
_ENCODING = {"runner": "pooling", "max_model_len": 512, "max_num_batched_tokens": 1024}

_SEERS = {
    "llava": multimodal.tiny_llava,
    "qwen2.5-vl": multimodal.tiny_qwen2_5_vl,
    "qwen3-vl": multimodal.tiny_qwen3_vl,
}
_CHOOSERS = (*models.MIXTURES, "qwen3_next")
_READERS = {**models.MAKERS, **models.MIXTURES, **models.RECURRENT}

FAMILIES: dict[str, Family] = {
    **{name: Family(make, engine=_TEXT, chooses=name in _CHOOSERS) for name, make in _READERS.items()},
    "lora": Family(models.tiny_llama, judges.of_adapters, _two_adapters_and_none, _LORA),
    **{name: Family(make, judges.of_images, lambda _: SEEN, _SEEING) for name, make in _SEERS.items()},
    "whisper": Family(multimodal.tiny_whisper, judges.of_recordings, lambda _: HEARD, _HEARING),
    **{
        name: Family(make, judges.embedder, lambda _: {"prompts": ENCODED}, _ENCODING)
        for name, make in models.ENCODERS.items()
    },
}

BY_TRITON = {name: Family(make, engine=_TEXT, chooses=name == "kimi_linear") for name, make in models.BY_TRITON.items()}
"""Those that run with TRITON_DEFAULT_BACKEND=npu."""
