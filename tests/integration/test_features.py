"""What the device cannot do is refused when the configuration is made, by name and with the way out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from tests.support import models
from tests.support.refusals import configure, configured, mixture_of_experts, run

if TYPE_CHECKING:
    from pathlib import Path

# Case -> engine arguments and what the refusal must say; settings of vLLM's are in settings.toml.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-setting": ({"additional_config": {"npu": {"num_thread": 1}}}, "did you mean 'num_threads'"),
    "olmo-hybrid": ({"model": "olmo-hybrid"}, "OlmoHybridForCausalLM calls Triton"),
    "kimi-linear": ({"model": "kimi-linear"}, r"KimiLinearForCausalLM \(vllm.models.kimi_k3\) runs on NVIDIA"),
}
REFUSED_BY_THE_LAYER: dict[str, tuple[dict[str, Any], str]] = {
    "attention-backend": ({"attention_backend": "FLASH_ATTN"}, "pass NPU_PAGED"),
    "cache-dtype": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
}
# As EngineArgs would, but without it: nothing has loaded vLLM's general plugins before.
BY_HAND = """
import json, sys, torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
assert not hasattr(torch.ops.npu_ops, "fused_experts")
VllmConfig(model_config=ModelConfig(**json.loads(sys.argv[1])), device_config=DeviceConfig("npu"))
assert hasattr(torch.ops.npu_ops, "fused_experts")
print("npu-ops is loaded")
"""
START = """
import json, sys
from vllm import LLM
LLM(**json.loads(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = models.tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 1 << 24,
    }


@pytest.fixture(scope="module")
def refusals(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case says, asked in one process."""
    folders = {
        "olmo-hybrid": configured(
            tmp_path_factory.mktemp("olmo"), "OlmoHybridForCausalLM", transformers.OlmoHybridConfig()
        ),
        "kimi-linear": configured(tmp_path_factory.mktemp("kimi"), "KimiLinearForCausalLM", kimi_linear()),
    }
    cases = {name: base | arguments for name, (arguments, _) in REFUSED.items()}
    for arguments in cases.values():
        arguments["model"] = str(folders.get(arguments["model"], arguments["model"]))
    return configure(cases | {"accepted": base})


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, refusals: dict[str, str]) -> None:
    assert re.search(REFUSED[name][1], refusals[name]), refusals[name]


def test_what_the_device_can_do_is_accepted(refusals: dict[str, str]) -> None:
    assert refusals["accepted"] == "accepted"


@pytest.mark.parametrize("name", REFUSED_BY_THE_LAYER)
def test_refused_when_the_model_is_built(name: str, base: dict[str, Any]) -> None:
    arguments, sentence = REFUSED_BY_THE_LAYER[name]
    done = run(START, base | arguments)
    assert done.returncode != 0, "the engine started"
    assert re.search(sentence, done.stdout + done.stderr), done.stderr[-3000:]


def test_the_v2_runner_is_refused(base: dict[str, Any]) -> None:
    said = configure({"v2": base}, VLLM_USE_V2_MODEL_RUNNER="1")["v2"]
    assert "launches Triton kernels without npu bodies: unset VLLM_USE_V2_MODEL_RUNNER." in said


def test_hisparse_and_watermarks_do_not_blame_the_variable_of_the_runner(base: dict[str, Any]) -> None:
    cases = {
        "hisparse": base | {"attention_config": {"hisparse_config": {}}},
        "watermark": base | {"watermark_config": {"key": 7}},
    }
    for sentence in configure(cases).values():
        assert "leave out" in sentence
        assert "VLLM_USE_V2_MODEL_RUNNER" not in sentence


def test_batch_invariance_where_all_sums_have_an_order(base: dict[str, Any], tmp_path: Path) -> None:
    mean, states = tmp_path / "mean", tmp_path / "states"
    cases = {
        "dense": base,
        "ranks": base | {"tensor_parallel_size": 4},
        "hosts": base | {"tensor_parallel_size": 4, "nnodes": 2, "distributed_executor_backend": "mp"},
        "mean": base
        | {"model": str(models.tiny_bert(mean)), "runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}},
        "states": base | {"model": str(models.tiny_mamba(states)), "mamba_ssm_cache_dtype": "float16"},
    }
    invariant = {"VLLM_BATCH_INVARIANT": "1", "NPU_SIMULATOR_DEVICES": "4"}
    said = configure(cases, **invariant)
    assert [said[name] for name in ("dense", "ranks")] == ["accepted"] * 2
    assert "more than two ranks on several hosts" in said["hosts"]
    assert "choose another seq_pooling_type" in said["mean"]
    assert "leave out --mamba-ssm-cache-dtype" in said["states"]
    assert "add npu_ops to npu" in configure({"dense": base}, VLLM_PLUGINS="npu", **invariant)["dense"]


def test_experts_need_npu_ops(base: dict[str, Any], tmp_path: Path) -> None:
    mixture = {"mixture": base | {"model": str(mixture_of_experts(tmp_path))}}
    assert configure(mixture) == {"mixture": "accepted"}
    refusal = configure(mixture, VLLM_PLUGINS="npu")["mixture"]
    assert "installed but not loaded, since VLLM_PLUGINS leaves it out: add npu_ops to npu" in refusal


def test_a_configuration_built_by_hand_has_the_kernels_of_npu_ops(tmp_path: Path) -> None:
    done = run(BY_HAND, {"model": str(mixture_of_experts(tmp_path))})
    assert "npu-ops is loaded" in done.stdout, done.stderr[-3000:]


def kimi_linear() -> Any:
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    layers = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
    return KimiLinearConfig(num_hidden_layers=2, num_attention_heads=4, linear_attn_config=layers, **sizes)
