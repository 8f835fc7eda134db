"""Blocks come back from the host tier with equal tokens on two devices; test_kv_offload.py does more by night.

Prompts come in chunks and push each other off the device; then it forgets what it has, and they come back. What is right
an engine of one device says that has no connector.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import models
from tests.support.engine_run import EngineRun, run_scenarios

PROMPT, NEW, BLOCK = 120, 24, 32
WHOLE = (PROMPT - 1) // BLOCK * BLOCK
ASKED = {
    "prompts": models.prompt_token_ids([PROMPT] * 4, seed=7),
    "sampling": {"temperature": 0.0, "max_tokens": NEW},
}
FORGET = {"calls": [["reset_prefix_cache", {}]]}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # so that prompts come in chunks
    "block_size": BLOCK,
    "num_gpu_blocks_override": 18,  # four answers want 20
    "enforce_eager": True,
}
HOST = {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False}
CONNECTOR = {
    "kv_transfer_config": {
        "kv_connector": "NPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": HOST,
    }
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP 2, asynchronous": ("llama", {"tensor_parallel_size": 2, "async_scheduling": True}),
    "TP 2, latent attention": ("deepseek_v2", {"tensor_parallel_size": 2, "async_scheduling": True}),
    "PP 2, synchronous": ("llama", {"pipeline_parallel_size": 2, "async_scheduling": False}),
}
ALONE = {"num_gpu_blocks_override": 64, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Run all engines in a process; those of one device last, since ranks are forks of it that want no device there."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: str(models.MAKERS[name](folder / name)) for name, _ in LAYOUTS.values()}
    scenarios: dict[str, dict[str, Any]] = {
        layout: {
            "engine": {**ENGINE, **CONNECTOR, **engine, "model": made[name]},
            "rounds": [ASKED, FORGET, ASKED],
        }
        for layout, (name, engine) in LAYOUTS.items()
    }
    scenarios |= {name: {"engine": {**ENGINE, **ALONE, "model": made[name]}, "rounds": [ASKED]} for name in made}
    devices = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return dict(zip(scenarios, run_scenarios(folder, list(scenarios.values()), devices), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_with_the_tokens_of_one_device_without_a_connector(
    layout: str, runs: dict[str, EngineRun]
) -> None:
    run, alone = runs[layout], runs[LAYOUTS[layout][0]]
    assert [one["cached"] for one in alone.rounds[0]] == [0] * 4
    assert run.tokens(0) == alone.tokens(0)
    assert run.tokens(2) == alone.tokens(0)
    assert all(one["cached"] >= WHOLE for one in run.rounds[2]), run.rounds[2]
    assert run.metrics["vllm:kv_offload_load_bytes"] > 0
    assert run.metrics["vllm:num_preemptions"] > 0
