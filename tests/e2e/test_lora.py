"""LoRA on npu: requests with one adapter, with another and with none share a batch, each with its own model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.adapters import adapter, adapter_of_experts, merged
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 10}
LENGTHS = [300, 1, 2, 17, 40, 41, 64, 129, 5]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 16,
    "cudagraph_capture_sizes": [1, 16],
}
ATTENTION, FEED_FORWARD = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("plugins", "settings"),
    [
        pytest.param("", {}, id="npu-ops"),
        pytest.param("npu", {}, id="torch"),
        pytest.param(
            "",
            {
                "max_cpu_loras": 3,
                "lora_target_modules": ATTENTION + FEED_FORWARD,
                "specialize_active_lora": True,
                "compilation_config": {"cudagraph_specialize_lora": True},
            },
            id="more-settings",
        ),
        pytest.param("", {"lora_dtype": "float16"}, id="other-dtype"),
        pytest.param("", {"tensor_parallel_size": 2, "fully_sharded_loras": True}, id="shared-out-among-ranks"),
        pytest.param(
            "npu",
            {"tensor_parallel_size": 2, "fully_sharded_loras": True},
            id="shared-out-among-ranks-torch",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_adapters_and_none_in_one_batch(plugins: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder, prompts = models.tiny_llama(tmp_path / "model", num_hidden_layers=2), models.prompt_token_ids(LENGTHS)
    model = load(folder)
    wide = adapter(tmp_path / "wide", model, ATTENTION + FEED_FORWARD, 16, seed=1)
    narrow = adapter(tmp_path / "narrow", model, ["q_proj", "v_proj"], 4, seed=2)
    whose = [str(wide), str(narrow), None] * 3
    rounds = [
        {"prompts": prompts, "sampling": GREEDY, "lora": whose},
        {"prompts": prompts, "sampling": GREEDY},  # the graphs serve a batch without adapters, too
        {"prompts": prompts, "sampling": GREEDY, "lora": whose[1:] + whose[:1]},
    ]
    ranks = settings.get("tensor_parallel_size", 1)
    environ = {"VLLM_PLUGINS": plugins} if plugins else {}
    environ |= {"NPU_SIMULATOR_DEVICES": str(ranks), "NPU_SIMULATOR_MEMORY": "2GiB"}
    run = run_engine(tmp_path, folder, rounds, environ, **ENGINE | settings)
    assert run.platform == "npu"
    if ranks == 1:  # those of ranks are in other processes
        assert (run.graphs_captured > 0) == (not plugins), "without npu-ops there are no graphs"
    judges = {None: model, str(wide): merged(model, wide), str(narrow): merged(model, narrow)}
    for number, one in enumerate(rounds):
        for prompt, output, name in zip(prompts, run.tokens(number), one.get("lora", [None] * 9), strict=True):
            assert_greedy(judges[name], prompt, output)
    assert run.tokens(0) != run.tokens(1)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="each-its-own"),
        pytest.param({"enable_moe_shared_loras": True}, id="shared", marks=pytest.mark.nightly),
        pytest.param({"tensor_parallel_size": 2}, id="ranks", marks=pytest.mark.nightly),
        pytest.param(
            {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="expert-parallel", marks=pytest.mark.nightly
        ),
        pytest.param({"tensor_parallel_size": 2, "fully_sharded_loras": True}, id="shared-out-among-ranks"),
        pytest.param(
            {"tensor_parallel_size": 2, "fully_sharded_loras": True, "enable_moe_shared_loras": True},
            id="shared-and-shared-out",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"enable_mixed_moe_lora_format": True, "enforce_eager": True}, id="eager", marks=pytest.mark.nightly
        ),
    ],
)
def test_adapters_of_experts(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two adapters of experts, one of attention and none in a batch, with graphs."""
    folder, prompts = models.tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2), models.prompt_token_ids(LENGTHS)
    model, shared = load(folder), "enable_moe_shared_loras" in settings
    adapters = [adapter_of_experts(tmp_path / f"experts-{seed}", model, 8, seed, shared) for seed in (1, 2)]
    adapters.append(adapter(tmp_path / "attention", model, ATTENTION, 4, seed=3))
    whose = [*map(str, adapters), None] * 2 + [str(adapters[0])]
    rounds = [{"prompts": prompts, "sampling": GREEDY, "lora": whose}, {"prompts": prompts, "sampling": GREEDY}]
    ranks = settings.get("tensor_parallel_size", 1)
    environ = {"NPU_SIMULATOR_DEVICES": str(ranks), "NPU_SIMULATOR_MEMORY": "2GiB"}
    run = run_engine(tmp_path, folder, rounds, environ, **ENGINE | {"max_loras": 3} | settings)
    if ranks == 1:
        assert (run.graphs_captured > 0) == ("enforce_eager" not in settings)
    judges = {None: model} | {str(path): merged(model, path) for path in adapters}
    for number, one in enumerate(rounds):
        for prompt, output, name in zip(prompts, run.tokens(number), one.get("lora", [None] * 9), strict=True):
            assert_greedy(judges[name], prompt, output)
    assert run.tokens(0) != run.tokens(1)


@pytest.mark.nightly
def test_adapters_of_a_router(tmp_path: Path) -> None:
    """One adapter of the routers alone, one of routers and attention, and none in a batch, with graphs."""
    folder, prompts = models.tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2), models.prompt_token_ids(LENGTHS)
    model = load(folder)
    alone = adapter(tmp_path / "alone", model, ["mlp.gate"], 8, seed=1)
    both = adapter(tmp_path / "both", model, ["mlp.gate", *ATTENTION], 8, seed=2)
    whose = [str(alone), str(both), None] * 3
    rounds = [{"prompts": prompts, "sampling": GREEDY, "lora": whose}, {"prompts": prompts, "sampling": GREEDY}]
    run = run_engine(tmp_path, folder, rounds, **ENGINE)
    assert run.graphs_captured
    judges = {None: model} | {str(path): merged(model, path) for path in (alone, both)}
    for number, one in enumerate(rounds):
        for prompt, output, name in zip(prompts, run.tokens(number), one.get("lora", [None] * 9), strict=True):
            assert_greedy(judges[name], prompt, output)
    different = [a != b for a, b, name in zip(run.tokens(0), run.tokens(1), whose, strict=True) if name == str(alone)]
    assert any(different), "the routers' adapter alone changes what is said"


@pytest.mark.nightly
def test_adapters_of_latent_attention(tmp_path: Path) -> None:
    """The layer that two of an adapter's modules are fused into is vLLM's own subclass, which npu has no class for."""
    folder = models.tiny_deepseek_v2(tmp_path / "model", num_hidden_layers=2, q_lora_rank=64)
    prompts, model = models.prompt_token_ids(LENGTHS), load(folder)
    one = adapter(tmp_path / "one", model, ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"], 8, seed=1)
    whose = [str(one), None, str(one)] * 3
    rounds = [{"prompts": prompts, "sampling": GREEDY, "lora": whose}, {"prompts": prompts, "sampling": GREEDY}]
    run = run_engine(tmp_path, folder, rounds, **ENGINE)
    judges = {None: model, str(one): merged(model, one)}
    for number, asked in enumerate(rounds):
        for prompt, output, name in zip(prompts, run.tokens(number), asked.get("lora", [None] * 9), strict=True):
            assert_greedy(judges[name], prompt, output)
    assert run.tokens(0) != run.tokens(1)
