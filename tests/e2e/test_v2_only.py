"""What vLLM's V2 model runner alone has: its tokens are those that transformers gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")
pytestmark = pytest.mark.nightly

NEW = 24
GREEDY = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True}
PROMPTS = models.prompt_token_ids([1, 15, 17, 40, 100, 130])
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 8],
}
CASES: dict[str, dict[str, Any]] = {
    "drafts in blocks": {"speculative_config": NGRAM | {"rejection_sample_method": "block"}},
    "fewer drafts in a crowd": {
        "speculative_config": NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]}
    },
    "drafts and preemption": {
        "speculative_config": NGRAM,
        "num_gpu_blocks_override": 24,
        "kv_cache_memory_bytes": None,
    },
    "stages, asynchronously": {"pipeline_parallel_size": 2, "async_scheduling": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name: str, model: Path, tmp_path: Path) -> None:
    environ = V2 | ({"NPU_SIMULATOR_DEVICES": "2"} if "pipeline_parallel_size" in CASES[name] else {})
    run = run_engine(tmp_path, model, [{"prompts": PROMPTS, "sampling": GREEDY}] * 2, environ, **ENGINE | CASES[name])
    assert run.platform == "npu"
    assert "npu runs vLLM's V2 model runner" in run.log
    for tokens in (run.tokens(0), run.tokens(1)):
        for prompt, output in zip(PROMPTS, tokens, strict=True):
            assert len(output) == NEW
            assert_greedy(load(model), prompt, output)
