"""Greedy tokens of models on two npu devices equal transformers', however the workers are started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 10}
PROMPTS = models.prompt_token_ids([1000, 1, 2, 3, 15, 16, 17, 31, 32, 33, 39, 40])
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 16],
    "tensor_parallel_size": 2,
}
TWO_DEVICES = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}


@pytest.mark.parametrize(
    ("name", "start"), [pytest.param("llama", "spawn", marks=pytest.mark.nightly), ("gemma3", "fork")]
)
def test_tensor_parallel(name: str, start: str, tmp_path: Path) -> None:
    model, environ = models.MAKERS[name](tmp_path / "model"), {"VLLM_WORKER_MULTIPROC_METHOD": start}
    run = run_engine(tmp_path, model, [{"prompts": PROMPTS, "sampling": GREEDY}], TWO_DEVICES | environ, **ENGINE)
    assert run.platform == "npu"
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == GREEDY["max_tokens"]
        assert_greedy(load(model), prompt, output)
