"""Greedy tokens on npu equal transformers', whatever the engine's settings; memory settings are honoured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import EngineRun, run_engine, run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

NEW = 10
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": NEW}
PROMPTS = models.prompt_token_ids([1, 2, 3, 15, 16, 17, 31, 32, 33, 39, 40, 300])
SAMPLED = {"prompts": [*PROMPTS[:2], PROMPTS[-1]], "sampling": SEEDED}  # the last is longer than a step
REPETITIVE = [prompt * 4 for prompt in models.prompt_token_ids([6, 9, 12], seed=6)]
LONG_ANSWERS = models.prompt_token_ids([150] * 8, seed=5)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 4, 16],
}
# Settings that change what is scheduled, cached, sampled or measured, but no greedy token.
MANY: dict[str, Any] = {
    "cudagraph_capture_sizes": None,
    "prefix_caching_hash_algo": "sha256_cbor",
    "scheduling_policy": "priority",
    "max_num_scheduled_tokens": 192,
    "max_num_active_seqs": 6,
    "long_prefill_token_threshold": 64,
    "long_prefill_token_threshold_adaptive": True,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.05,
    "stream_interval": 3,
    "disable_hybrid_kv_cache_manager": True,
    "use_fp64_gumbel": True,
    "max_logprobs": 5,
    "logprobs_mode": "processed_logprobs",
    "seed": 3,
    "model_impl": "vllm",
    "load_format": "safetensors",
    "safetensors_load_strategy": "eager",
    "compilation_config": {"cudagraph_mode": "FULL", "custom_ops": ["all", "-silu_and_mul"]},
    "max_cudagraph_capture_size": 8,
    "cudagraph_metrics": True,
    "enable_mfu_metrics": True,
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 1.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "asynchronous-scheduling": {"async_scheduling": True},
    "block-128": {"block_size": 128},
    "whole-prompts": {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
    "many-at-once": MANY,
    "torch-sampler": {"additional_config": {"npu": {"sampler": "torch", "num_threads": 1}}},
}
# A cache too small for the batch: requests are thrown out and computed again.
CROWDED = {"max_model_len": 256, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_qwen3(tmp_path_factory.mktemp("settings") / "model")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_deepseek_v2(tmp_path_factory.mktemp("latent") / "model")


@pytest.fixture(scope="module")
def runs(model: Path, latent: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """An engine for each setting, one after the other in one process."""
    greedy = {"prompts": PROMPTS, "sampling": GREEDY}
    cases = {name: (settings, [greedy, SAMPLED, SAMPLED]) for name, settings in SETTINGS.items()}
    cases["crowded"] = (CROWDED, [{"prompts": LONG_ANSWERS, "sampling": GREEDY | {"max_tokens": 60}}])
    cases["speculation"] = ({"speculative_config": SPECULATION}, [{"prompts": REPETITIVE, "sampling": GREEDY}])
    drafted = [*PROMPTS[:4], *REPETITIVE]  # in one batch, so that only some have drafts
    speculation = {"speculative_config": SPECULATION, "model": str(latent), "enable_prefix_caching": True}
    cases["speculation-latent"] = (speculation, [{"prompts": drafted, "sampling": GREEDY | {"max_tokens": 40}}] * 2)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    drawn = [{"prompts": REPETITIVE, "sampling": SEEDED | strengths} for strengths in ({}, penalties)]
    cases["speculation-drawn"] = ({"speculative_config": SPECULATION}, [*drawn, *drawn])
    scenarios = [
        {"engine": {"model": str(model)} | ENGINE | settings, "rounds": rounds} for settings, rounds in cases.values()
    ]
    return dict(zip(cases, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, model: Path, runs: dict[str, EngineRun]) -> None:
    run = runs[name]
    assert (run.graphs_captured == 0) == (name == "eager")
    check(model, PROMPTS, run)
    assert run.tokens(1) == run.tokens(2)
    if name in ("synchronous-scheduling", "block-128", "whole-prompts"):
        assert run.tokens(1) == runs["eager"].tokens(1), "a seed gives the same tokens however a prompt is cut"


def test_preemption(model: Path, runs: dict[str, EngineRun]) -> None:
    assert runs["crowded"].metrics["vllm:num_preemptions"] > 0
    check(model, LONG_ANSWERS, runs["crowded"], 60)


def test_ngram_speculation(model: Path, runs: dict[str, EngineRun]) -> None:
    assert runs["speculation"].metrics["vllm:spec_decode_num_draft_tokens"] > 0
    check(model, REPETITIVE, runs["speculation"])


def test_ngram_speculation_over_latents(latent: Path, runs: dict[str, EngineRun]) -> None:
    run = runs["speculation-latent"]
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert run.graphs_captured
    check(latent, [*PROMPTS[:4], *REPETITIVE], run, 40)
    assert max(output["cached"] for output in run.rounds[1]) > 0  # a few new tokens after a cached prompt
    assert run.tokens(1) == run.tokens(0)


def test_drawn_tokens_of_speculation_are_repeatable(runs: dict[str, EngineRun]) -> None:
    run = runs["speculation-drawn"]
    assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert (run.tokens(2), run.tokens(3)) == (run.tokens(0), run.tokens(1))
    assert run.tokens(0) != run.tokens(1)


def test_memory_settings_are_honoured(model: Path, tmp_path: Path) -> None:
    """--gpu-memory-utilization bounds the device's allocated bytes; too little memory is refused with the numbers."""
    rounds = [{"prompts": PROMPTS[4:5], "sampling": GREEDY}]
    engine = {key: value for key, value in ENGINE.items() if key != "kv_cache_memory_bytes"} | {"model": str(model)}
    shares = [{"engine": engine | {"gpu_memory_utilization": share}, "rounds": rounds} for share in (0.2, 0.4)]
    log = run_scenarios(tmp_path, shares)[0].log
    few, many = (int(line.split(" tokens")[0].replace(",", "")) for line in log.split("NPU KV cache size: ")[1:])
    assert 1.9 < many / few < 2.3
    # The ledger of the second, whose device has 4 GiB of the host.
    *_, ledger = re.findall(r"memory in GiB: weights ([\d.]+), KV cache ([\d.]+), .* all take ([\d.]+)", log)
    weights, cache, total = map(float, ledger)
    assert cache == pytest.approx(0.4 * 4, rel=0.2)
    assert weights + cache <= total <= 0.4 * 4 + 0.3
    with pytest.raises(AssertionError, match="NPU out of memory. Tried to allocate"):
        run_engine(tmp_path / "small", rounds=rounds, environ={"NPU_SIMULATOR_MEMORY": "24MiB"}, **engine)


def check(model: Path, prompts: list[list[int]], run: EngineRun, new: int = NEW) -> None:
    """Assert that the tokens of the first round are transformers'."""
    assert run.platform == "npu"
    for prompt, output in zip(prompts, run.tokens(0), strict=True):
        assert len(output) == new
        assert_greedy(load(model), prompt, output)
