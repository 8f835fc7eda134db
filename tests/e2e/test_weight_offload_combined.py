"""Weights that kernels read in the host's memory, beside other features: the tokens are those of weights on the device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import judges, models
from tests.support.adapters import adapter
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import load

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = models.prompt_token_ids([3, 40, 100, 17], seed=5)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "cudagraph_capture_sizes": [4],
    "cpu_offload_gb": 0.01,
}
# Engine arguments, and variables.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "compiled": ({"compilation_config": {"mode": 3, "backend": "eager"}}, {}),
    "Inductor": ({"compilation_config": {"mode": 3, "backend": "inductor"}}, {}),
    "V2 runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "V2 runner, compiled": ({"compilation_config": {"mode": 3}}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "checked memory": ({}, {"NPU_DEBUG": "memory"}),
    "adapters": (LORA, {}),
    "adapters, compiled": (LORA | {"compilation_config": {"mode": 3, "backend": "eager"}}, {}),
    "TP 2": ({"tensor_parallel_size": 2}, {"NPU_SIMULATOR_DEVICES": "2", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}),
    "n-gram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}, {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BESIDE)
def test_weights_in_the_hosts_memory(name: str, tmp_path: Path) -> None:
    settings, environ = BESIDE[name]
    folder = models.tiny_llama(tmp_path / "model", num_hidden_layers=6)
    asked: dict[str, Any] = {"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": 8}}
    if "enable_lora" in settings:
        made = str(adapter(tmp_path / "adapter", load(folder), ["q_proj", "v_proj", "down_proj"], 8, seed=1))
        asked["lora"] = [made, None, made, None]
    small = {"NPU_SIMULATOR_MEMORY": "2GiB", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    run = run_engine(tmp_path / "run", folder, [asked], small | environ, **ENGINE | settings)
    assert run.platform == "npu"
    assert re.search(r"Total CPU offloaded parameters: 0\.0[12]", run.log), run.log[-3000:]
    judge = judges.of_adapters(folder)
    for request, output in zip(judges.requests(asked), run.tokens(0), strict=True):
        assert judge(request, output).argmax(-1).tolist() == output
