"""Greedy tokens of mixture-of-experts models on npu equal transformers', on one device and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 10}
# Prompts of some tokens an expert and of many, one of them prefilled in two chunks.
LENGTHS = [300, 1, 2, 17, 40, 41, 64, 129, 5, 9, 12, 200]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
TWO_DEVICES = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("mixtral", {}, id="mixtral"),
        pytest.param("gpt_oss", {}, id="gpt-oss"),
        pytest.param("glm4_moe", {"enforce_eager": True}, id="glm4-moe-eager"),
        pytest.param("qwen3_moe", {"tensor_parallel_size": 2}, id="qwen3-moe-on-two"),
        pytest.param(
            "glm4_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="glm4-moe-expert-parallel"
        ),
    ],
)
def test_tokens(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, prompts = models.MIXTURES[name](tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    rounds = [{"prompts": prompts, "sampling": GREEDY}, {"prompts": prompts[:1], "sampling": GREEDY}]
    two = "tensor_parallel_size" in settings
    run = run_engine(tmp_path, model, rounds, TWO_DEVICES if two else None, **ENGINE | settings)
    assert run.platform == "npu"
    assert two or (run.graphs_captured > 0) == ("enforce_eager" not in settings)
    outputs = [*run.tokens(0), *run.tokens(1)]
    for prompt, output in zip([*prompts, prompts[0]], outputs, strict=True):
        assert len(output) == GREEDY["max_tokens"]
        assert_greedy(load(model), prompt, output)
