"""GGUF checkpoints say what transformers says with the same rounded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import gguf_files, models
from tests.support.engine_run import run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = models.prompt_token_ids([3, 40, 100], seed=5)
ROUNDS = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": 8}}]
ENGINE: dict[str, Any] = {
    "load_format": "gguf",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [4],
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": models.tiny_llama,
    "qwen3": models.tiny_qwen3,
    "qwen3moe": lambda folder: models.tiny_qwen3_moe(folder, mlp_only_layers=[]),  # ggml has no dense layers there
    "gemma3": models.tiny_gemma3,
}


@pytest.mark.nightly
def test_gguf(tmp_path: Path) -> None:
    folders = [
        gguf_files.write(make(tmp_path / name), tmp_path / f"{name} gguf", name) for name, make in MODELS.items()
    ]
    scenarios = [{"engine": ENGINE | {"model": str(folder)}, "rounds": ROUNDS} for folder in folders]
    for folder, run in zip(folders, run_scenarios(tmp_path / "runs", scenarios), strict=True):
        assert run.platform == "npu"
        for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
            assert_greedy(load(folder / "exact"), prompt, output)
