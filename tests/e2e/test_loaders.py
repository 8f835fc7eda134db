"""Checkpoints that vLLM's other loaders read give transformers' tokens; their packages are extras of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

PROMPTS = models.prompt_token_ids([3, 40, 100], seed=5)
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 26,
}


def test_run_ai_streamer(tmp_path: Path) -> None:
    pytest.importorskip("runai_model_streamer", reason="vLLM's extra runai")
    model = models.tiny_llama(tmp_path / "model")
    reference, found = load(model), run(model, tmp_path, load_format="runai_streamer")
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert_greedy(reference, prompt, output)


def run(model: Path, folder: Path, **engine: Any) -> list[list[int]]:
    done = run_engine(folder / "run", model, [{"prompts": PROMPTS, "sampling": GREEDY}], **SETTINGS | engine)
    assert done.platform == "npu"
    return done.tokens(0)
