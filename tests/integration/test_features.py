"""What the device cannot do is refused when the configuration is made, by name and with the way out."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from tests.support import models
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

# Case -> engine arguments and what the refusal must say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "expert-parallel": (
        {"model": "mixture", "data_parallel_size": 2, "enable_expert_parallel": True},
        "leave out --enable-expert-parallel",
    ),
    "context-parallel": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
        "context-parallel-size at 1",
    ),
    "unknown-setting": ({"additional_config": {"npu": {"num_thread": 1}}}, "did you mean 'num_threads'"),
    "compilation": ({"compilation_config": {"mode": 3}}, "leave out the mode"),
    "weight-offload": ({"cpu_offload_gb": 1}, "leave out --cpu-offload-gb"),
    "quantisation": ({"quantization": "modelopt_fp4"}, "no kernels for modelopt_fp4"),
    "sleep-mode": ({"enable_sleep_mode": True}, "[Ss]leep mode"),
    "lora-dtype": ({"enable_lora": True, "dtype": "float32", "lora_dtype": "float16"}, "leave out --lora-dtype"),
    "olmo-hybrid": ({"model": "olmo-hybrid"}, "OlmoHybridForCausalLM calls Triton"),
    "kimi-linear": ({"model": "kimi-linear"}, r"KimiLinearForCausalLM \(vllm.models.kimi_k3\) runs on NVIDIA"),
    "experts-lora": ({"model": "mixture", "enable_lora": True}, "leave out --enable-lora"),
}
REFUSED_BY_THE_LAYER: dict[str, tuple[dict[str, Any], str]] = {
    "attention-backend": ({"attention_backend": "FLASH_ATTN"}, "pass NPU_PAGED"),
    "cache-dtype": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
}
CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
said = {}
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        EngineArgs(**arguments).create_engine_config()
        said[name] = "accepted"
    except Exception as error:
        said[name] = str(error)
print("SAID " + json.dumps(said))
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
        "mixture": mixture_of_experts(tmp_path_factory.mktemp("mixture")),
        "olmo-hybrid": configured(
            tmp_path_factory.mktemp("olmo"), "OlmoHybridForCausalLM", transformers.OlmoHybridConfig()
        ),
        "kimi-linear": configured(tmp_path_factory.mktemp("kimi"), "KimiLinearForCausalLM", kimi_linear()),
    }
    cases = {name: base | arguments for name, (arguments, _) in REFUSED.items()}
    for arguments in cases.values():
        arguments["model"] = str(folders.get(arguments["model"], arguments["model"]))
    cases["accepted"] = base
    done = run(CONFIGURE, cases)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("SAID "))


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
    done = run(CONFIGURE, {"v2": base}, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in done.stdout or "Model Runner V2 requires Triton" in done.stdout


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
    said = run(CONFIGURE, cases, **invariant).stdout
    said = json.loads(said.split("SAID ")[1])
    assert [said[name] for name in ("dense", "ranks")] == ["accepted"] * 2
    assert "more than two ranks on several hosts" in said["hosts"]
    assert "choose another seq_pooling_type" in said["mean"]
    assert "leave out --mamba-ssm-cache-dtype" in said["states"]
    assert "pip install npu-ops" in run(CONFIGURE, {"dense": base}, VLLM_PLUGINS="npu", **invariant).stdout


def test_experts_need_npu_ops(base: dict[str, Any], tmp_path: Path) -> None:
    mixture = {"mixture": base | {"model": str(mixture_of_experts(tmp_path))}}
    assert '"accepted"' in run(CONFIGURE, mixture).stdout
    assert "pip install npu-ops" in run(CONFIGURE, mixture, VLLM_PLUGINS="npu").stdout


def mixture_of_experts(folder: Path) -> Path:
    config = transformers.Qwen3MoeConfig(num_hidden_layers=1, num_experts=4)
    return configured(folder, "Qwen3MoeForCausalLM", config)


def kimi_linear() -> Any:
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    layers = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
    return KimiLinearConfig(num_hidden_layers=2, num_attention_heads=4, linear_attn_config=layers, **sizes)


def configured(folder: Path, architecture: str, config: Any) -> Path:
    """Write what a model's configuration is, without weights."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def run(code: str, argument: dict[str, Any], **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "1GiB"}
    return run_program(code, json.dumps(argument), **{**settings, **environ})
