"""Greedy tokens on npu equal transformers', whatever the model, the batch and the engine's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import models
from tests.support.engine_run import EngineRun, run_engine
from tests.support.transformers_reference import assert_greedy, load, next_token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEW = 10
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": NEW}
# 32 prompts of 1 to 1,500 tokens: shorter and longer than a block, a chunk and the sliding window, and their edges.
LENGTHS = [1500, 1, 2, 3, 15, 16, 17, 31, 32, 33, 39, 40, 41, 64, 100, 127, 128, 129, 255, 256, 257, 300, 511, 513]
LENGTHS += [5, 9, 12, 20, 48, 77, 200, 700]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1600,
    "max_num_batched_tokens": 256,  # prompts longer than this are prefilled in chunks
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
}


# Settings that change what is scheduled, cached, sampled or measured, but no greedy token.
MANY: dict[str, Any] = {
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = models.MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return make


def check_round(model: Path, prompts: list[list[int]], run: EngineRun, number: int = 0) -> None:
    reference = load(model)
    for prompt, output in zip(prompts, run.tokens(number), strict=True):
        assert len(output) == NEW
        assert_greedy(reference, prompt, output)


@pytest.mark.parametrize("name", models.MAKERS)
def test_model(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """One prompt, 32 mixed prompts in chunks, the same again from the prefix cache, and seeded sampling twice."""
    model, prompts = checkpoint(name), models.prompt_token_ids(LENGTHS)
    alone = models.prompt_token_ids([23], seed=1)
    sampled = models.prompt_token_ids([30, 60, 90], seed=2)
    rounds = [
        {"prompts": alone, "sampling": GREEDY},
        {"prompts": prompts, "sampling": GREEDY},
        {"prompts": prompts, "sampling": GREEDY},
        {"prompts": sampled, "sampling": SEEDED},
        {"prompts": sampled, "sampling": SEEDED},
    ]
    run = run_engine(tmp_path, model, rounds, **ENGINE)
    assert run.platform == "npu"
    assert run.graphs_captured > 0, "decode graphs are on by default"
    check_round(model, alone, run, 0)
    check_round(model, prompts, run, 1)
    check_round(model, prompts, run, 2)
    assert not any(output["cached"] for output in run.rounds[1])
    assert max(output["cached"] for output in run.rounds[2]) > 1000, "the second pass comes from the prefix cache"
    assert run.tokens(3) == run.tokens(4), "a seed gives the same tokens again"
    assert run.tokens(3) != [output[:NEW] for output in run.tokens(1)[:3]]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_logprobs_are_within_noise(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    ours, theirs = logprob_errors(checkpoint(name), tmp_path)
    assert ours <= 1.5 * theirs, f"rms error {ours:.4f}, transformers in bfloat16 {theirs:.4f}"


@pytest.mark.parametrize(("cache", "times", "exact"), [("fp8", 8.0, []), ("int8_per_token_head", 2.5, ["0", "2"])])
@pytest.mark.parametrize("name", ["qwen3"])
def test_logprobs_from_a_cache_of_codes_are_close(
    name: str, cache: str, times: float, exact: list[str], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """e4m3 has 3 bits behind the point where bfloat16 has 7, int8 by token as many for the largest value."""
    ours, theirs = logprob_errors(checkpoint(name), tmp_path, kv_cache_dtype=cache, kv_cache_dtype_skip_layers=exact)
    assert ours <= times * theirs, f"rms error {ours:.4f}, transformers in bfloat16 {theirs:.4f}"


def logprob_errors(model: Path, folder: Path, **engine: Any) -> tuple[float, float]:
    """Return the rms errors of chosen logprobs, ours and transformers', both in bfloat16, against float32."""
    prompts = models.prompt_token_ids(LENGTHS[4:20], seed=3)
    rounds = [{"prompts": prompts, "sampling": {**GREEDY, "logprobs": 1}}]
    run = run_engine(folder, model, rounds, **{**ENGINE, "dtype": "bfloat16", **engine})
    exact, rounded = load(model), load(model, torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(prompts, run.rounds[0], strict=True):
        steps = torch.arange(NEW)
        tokens = torch.tensor(output["tokens"])
        truth = next_token_logprobs(exact, prompt, output["tokens"])
        noise = next_token_logprobs(rounded, prompt, output["tokens"])
        ours.append(torch.tensor(output["logprobs"]) - truth[steps, tokens])
        theirs.append(noise[steps, tokens] - truth[steps, tokens])
    return torch.cat(ours).square().mean().sqrt().item(), torch.cat(theirs).square().mean().sqrt().item()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({"async_scheduling": False}, id="synchronous-scheduling"),
        pytest.param({"block_size": 128}, id="block-128"),
        pytest.param({"additional_config": {"npu": {"sampler": "torch", "num_threads": 1}}}, id="torch-sampler"),
        pytest.param(MANY, id="many-at-once"),
    ],
)
def test_settings(settings: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model, prompts = checkpoint("qwen3"), models.prompt_token_ids(LENGTHS[1:13])
    sampled = {"prompts": prompts[:3], "sampling": SEEDED}
    run = run_engine(
        tmp_path, model, [{"prompts": prompts, "sampling": GREEDY}, sampled, sampled], **{**ENGINE, **settings}
    )
    assert (run.graphs_captured == 0) == ("enforce_eager" in settings)
    check_round(model, prompts, run)
    assert run.tokens(1) == run.tokens(2)


def test_preemption(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A cache too small for the batch: requests are thrown out and computed again, with the same tokens."""
    model = checkpoint("llama")
    prompts = models.prompt_token_ids([150] * 8, seed=5)
    sampling = {"temperature": 0.0, "max_tokens": 60}
    run = run_engine(
        tmp_path,
        model,
        [{"prompts": prompts, "sampling": sampling}],
        **{**ENGINE, "max_model_len": 256, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64},
    )
    assert run.metrics["vllm:num_preemptions"] > 0
    for prompt, output in zip(prompts, run.tokens(0), strict=True):
        assert len(output) == 60
        assert_greedy(load(model), prompt, output)


@pytest.mark.parametrize(("name", "start"), [("llama", "spawn"), ("gemma3", "fork")])
def test_tensor_parallel(name: str, start: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model, prompts = checkpoint(name), models.prompt_token_ids(LENGTHS[:12])
    run = run_engine(
        tmp_path,
        model,
        [{"prompts": prompts, "sampling": GREEDY}],
        {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB", "VLLM_WORKER_MULTIPROC_METHOD": start},
        **{**ENGINE, "tensor_parallel_size": 2},
    )
    check_round(model, prompts, run)


def test_ngram_speculation(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    prompts = [prompt * 4 for prompt in models.prompt_token_ids([6, 9, 12], seed=6)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    run = run_engine(
        tmp_path, model, [{"prompts": prompts, "sampling": GREEDY}], **{**ENGINE, "speculative_config": speculation}
    )
    assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    check_round(model, prompts, run)


def test_memory_settings_are_honoured(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """--gpu-memory-utilization bounds the device's allocated bytes; too little memory is refused with the numbers."""
    model = checkpoint("llama")
    prompts = [{"prompts": models.prompt_token_ids([5]), "sampling": GREEDY}]
    engine = {key: value for key, value in ENGINE.items() if key != "kv_cache_memory_bytes"}
    sizes = {}
    for share in (0.2, 0.4):
        run = run_engine(tmp_path / str(share), model, prompts, **engine, gpu_memory_utilization=share)
        sizes[share] = int(run.log.split("NPU KV cache size: ")[1].split(" tokens")[0].replace(",", ""))
    assert 1.9 < sizes[0.4] / sizes[0.2] < 2.3
    with pytest.raises(AssertionError, match="NPU out of memory. Tried to allocate"):
        run_engine(tmp_path / "small", model, prompts, {"NPU_SIMULATOR_MEMORY": "24MiB"}, **engine)
