"""vLLM runs transformers' own code for a model on npu (`--model-impl transformers`), as it does on other devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 10}
PROMPTS = models.prompt_token_ids([1, 17, 130, 300], seed=3)
ENGINE: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 4],
}


@pytest.mark.nightly
@pytest.mark.parametrize("make", [models.tiny_llama, models.tiny_gemma3, models.tiny_gpt_oss, models.tiny_qwen3_moe])
def test_greedy_tokens(make: Callable[..., Path], tmp_path: Path) -> None:
    """Also of gpt-oss, whose experts are transformers' (`torch.histc`, `grouped_mm`) where Qwen's are vLLM's."""
    model = make(tmp_path / "model")
    run = run_engine(tmp_path, model, [{"prompts": PROMPTS, "sampling": GREEDY}], **ENGINE)
    assert run.graphs_captured > 0
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert_greedy(load(model), prompt, output)
