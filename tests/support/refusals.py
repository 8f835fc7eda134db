"""Everything that is refused on npu: what asks for it, and what it is really refused with.

Settings of vLLM are in tests/integration/settings.toml, the rest is here: models, and what hangs on variables.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import transformers

from tests.support import models, multimodal
from tests.support.settings_page import refused
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Case", "ask", "cases", "configure", "configured", "mixture_of_experts", "run"]


@dataclass(frozen=True)
class Case:
    """Engine arguments and variables that are refused, and a regular expression of what is said.

    "{llama}" is the folder of a model of `_FOLDERS`.
    """

    given: dict[str, Any]
    sentence: str
    environ: dict[str, str] = field(default_factory=dict)


_INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "NPU_SIMULATOR_DEVICES": "4"}
_WITHOUT_OPS = {"VLLM_PLUGINS": "npu"}
_V1, _V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
_NO_CXX = {"CXX": "no-such-compiler"}
_BOTH = {"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
_STAGES_OF_HEADS = {
    "model": "{with-a-head}",
    "pipeline_parallel_size": 2,
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
}
_TOWERS = {"model": "{qwen}", "enable_lora": True, "enable_tower_connector_lora": True}
_OTHERS: tuple[Case, ...] = (
    Case({"additional_config": {"npu": {"num_thread": 1}}}, "did you mean 'num_threads'"),
    Case(
        {"model": "{olmo-hybrid}"},
        "OlmoHybridForCausalLM runs Triton kernels, and VLLM_USE_V2_MODEL_RUNNER=0 leaves them out: set TRITON_DEFAULT",
        _V1,
    ),
    Case({"model": "{kimi-linear}"}, r"KimiLinearForCausalLM runs Triton kernels, and there is no C\+\+ comp", _NO_CXX),
    Case({"model": "{of-gpus}"}, r"MiniMaxM3SparseForCausalLM \(vllm.models.minimax_m3\) runs on NVIDIA"),
    Case(
        {"model": "{mamba}", "use_replayssm": True},
        "ReplaySSM runs vLLM's Triton kernels, and VLLM_USE_V2_MODEL_RUNNER=0 leaves them out: set TRITON_DEFAULT",
        _V1,
    ),
    Case({"model": "{mamba}", "speculative_config": _NGRAM}, "rolls states back beside attention only"),
    Case({"pipeline_parallel_size": 2, "speculative_config": _NGRAM}, "drafts by EAGLE-3 and .*, not by ngram"),
    Case(_STAGES_OF_HEADS, "Drafts beside pipeline stages need the V2 model runner", _V1),
    Case(_STAGES_OF_HEADS | {"async_scheduling": False}, "scheduled ahead: leave out --no-async-scheduling"),
    Case(_TOWERS | {"limit_mm_per_prompt": {"image": 1}}, "Adapters of what sees count images alone"),
    Case(
        _TOWERS | {"limit_mm_per_prompt": {"video": 0}, "mm_encoder_tp_mode": "data"},
        "vLLM gives each rank the adapters of all images: leave out --mm-encoder-tp-mode",
    ),
    Case({"model": "{mixture}", "enable_lora": True, "quantization": "fp8"}, "no npu kernels for quantised experts"),
    Case({}, r"there is no C\+\+ compiler", _V2 | {"CXX": "no-such-compiler", "TRITON_CACHE_DIR": "an-empty-folder"}),
    Case({}, "npu was not Triton's one device when vLLM was imported", _V2 | {"TRITON_BACKENDS_IN_TREE": "1"}),
    Case({}, "the null device computes nothing", _V2 | {"NPU_DEVICE": "null"}),
    Case({"logits_processors": ["tests.support.few_tokens:FewTokens"]}, "logits processors of V1's class", _V2),
    Case(
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        "does not have pipeline parallelism with external_launcher",
        _V2,
    ),
    Case({"model": "{mixture}"}, "VLLM_PLUGINS leaves it out: add npu_ops to npu", _WITHOUT_OPS),
    Case({"model": "{mamba}"}, "VLLM_PLUGINS leaves it out: add npu_ops to npu", _WITHOUT_OPS),
    Case({}, "add npu_ops to npu", _WITHOUT_OPS | {"VLLM_BATCH_INVARIANT": "1"}),
    Case({}, "npu-ops is installed and does not load: NPU_ISA must be one of", {"NPU_ISA": "sse"}),
    Case(
        {"tensor_parallel_size": 4, "nnodes": 2, "distributed_executor_backend": "mp"},
        "more than two ranks on several hosts",
        _INVARIANT,
    ),
    Case(
        {"model": "{bert}", "runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}},
        "choose another seq_pooling_type",
        _INVARIANT,
    ),
    Case({"model": "{mamba}", "mamba_ssm_cache_dtype": "float16"}, "leave out --mamba-ssm-cache-dtype", _INVARIANT),
    Case(
        {
            "model": "{one-head}",
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "speculative_config": {"method": "draft_model", "model": "{one-head}", "num_speculative_tokens": 2},
        },
        "The cache of what drafts is not shared out",
    ),
    Case(
        {"model": "{latent}", "tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
        "latent attention and experts are on ranks of both kinds",
        {"NPU_SIMULATOR_DEVICES": "4"},
    ),
    Case(
        {"model": "{hybrid}", "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "States are not shared out among context-parallel ranks",
    ),
    Case({"model": "{hybrid}", "pipeline_parallel_size": 2}, "asks each stage for all layers"),
    Case(
        {"model": "{one-head-of-windows}", "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "Windows of answers .R-SWA. need all keys of a request on each rank",
    ),
    Case(
        {"model": "{one-head-of-windows}", "kv_transfer_config": {"kv_connector": "NPUOffloadConnector"} | _BOTH},
        "the blocks before that are given back",
    ),
    Case({"model": "{dynamic}", "max_model_len": 600}, "for 512 positions only: pass --max-model-len 512"),
    Case({"attention_backend": "FLASH_ATTN"}, "pass NPU_PAGED"),
    Case({"model": "{latent}", "attention_backend": "NPU_PAGED"}, "pass NPU_MLA"),
    Case({"kv_cache_dtype": "fp8_e5m2"}, "NPU_PAGED has no KV cache of the kind fp8_e5m2"),
    Case({"model": "{latent}", "kv_cache_dtype": "int8_per_token_head"}, "NPU_MLA has no KV cache of the kind int8"),
)
_SMALL: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24}
_CONFIGURE = """
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


def cases() -> dict[str, Case]:
    """Return all cases by what asks for them."""
    settings = [Case(entry["given"], entry["sentence"], entry.get("environ", {})) for entry in refused().values()]
    return {_name(case): case for case in [*settings, *_OTHERS]}


def ask(wanted: dict[str, Case], folder: Path) -> dict[str, str]:
    """Return what each case is refused with, without vLLM's frame around it, or "accepted"."""
    folders = {name: make(folder / name) for name, make in _FOLDERS.items()}
    by_environ: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    said: dict[str, str] = {}
    for name, case in wanted.items():
        arguments = _with_folders({"model": "{llama}"} | case.given, folders)
        by_environ[json.dumps(case.environ)][name] = arguments
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(configure, some, **json.loads(environ)) for environ, some in by_environ.items()]
        for answers in asked:
            said |= answers.result()
    return {name: _sentence(said[name]) for name in wanted}


def configure(wanted: dict[str, dict[str, Any]], **environ: str) -> dict[str, str]:
    """Return what each case's engine arguments are refused with, or "accepted"."""
    return _said(run(_CONFIGURE, {name: _SMALL | arguments for name, arguments in wanted.items()}, **environ))


def run(code: str, argument: dict[str, Any], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program with one argument, as JSON."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "1GiB"}
    return run_program(code, json.dumps(argument), **{**settings, **environ})


def mixture_of_experts(folder: Path) -> Path:
    """Write the configuration of a mixture-of-experts model."""
    config = transformers.Qwen3MoeConfig(num_hidden_layers=1, num_experts=4)
    return configured(folder, "Qwen3MoeForCausalLM", config)


def configured(folder: Path, architecture: str, config: Any) -> Path:
    """Write what a model's configuration is, without weights."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def _kimi_linear(folder: Path) -> Path:
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    layers = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
    config = KimiLinearConfig(num_hidden_layers=2, num_attention_heads=4, linear_attn_config=layers, **sizes)
    return configured(folder, "KimiLinearForCausalLM", config)


_FOLDERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: models.tiny_llama(folder, num_hidden_layers=1),
    "mixture": mixture_of_experts,
    "mamba": models.tiny_mamba,
    "one-head": lambda folder: models.tiny_llama(folder, num_hidden_layers=1, num_key_value_heads=1),
    "one-head-of-windows": lambda folder: models.tiny_llama(
        folder, num_hidden_layers=1, num_key_value_heads=1, head_dim=32, rswa_window=8
    ),
    "dynamic": lambda folder: configured(
        folder,
        "LlamaForCausalLM",
        transformers.LlamaConfig(
            max_position_embeddings=512, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
    ),
    "latent": models.tiny_deepseek_v2,
    "with-a-head": lambda folder: models.tiny_deepseek_v3(folder, num_nextn_predict_layers=1),
    "hybrid": lambda folder: models.tiny_granite_hybrid(folder, num_key_value_heads=1),
    "bert": models.tiny_bert,
    "llava": multimodal.tiny_llava,
    "qwen": multimodal.tiny_qwen2_5_vl,
    "olmo-hybrid": lambda folder: configured(folder, "OlmoHybridForCausalLM", transformers.OlmoHybridConfig()),
    "kimi-linear": _kimi_linear,
    "of-gpus": lambda folder: configured(folder, "MiniMaxM3SparseForCausalLM", transformers.LlamaConfig()),
}


def _name(case: Case) -> str:
    return " ".join([*(f"{name}={value}" for name, value in case.environ.items()), json.dumps(case.given)])


def _with_folders(arguments: dict[str, Any], folders: dict[str, Path]) -> dict[str, Any]:
    text = json.dumps(arguments)
    for name, folder in folders.items():
        text = text.replace(f"{{{name}}}", str(folder))
    return json.loads(text)


def _said(done: subprocess.CompletedProcess[str]) -> Any:
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("SAID "))


def _sentence(said: str) -> str:
    """Take pydantic's frame off."""
    framed = re.search(r"(?:Value error|Assertion failed), (.*?) \[type=", said, re.DOTALL)
    return framed[1] if framed else said
