"""What the device cannot do is refused when the configuration is made, by name and with the way out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import models

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("mixture")
    transformers.Qwen3MoeConfig(
        num_hidden_layers=1, num_experts=4, architectures=["Qwen3MoeForCausalLM"]
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"enable_expert_parallel": True}, "leave out --enable-expert-parallel"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "context-parallel-size at 1"),
        ({"additional_config": {"npu": {"num_thread": 1}}}, "did you mean 'num_threads'"),
        ({"compilation_config": {"mode": 3}}, "leave out -O"),
        ({"cpu_offload_gb": 1}, "leave out --cpu-offload-gb"),
        ({"quantization": "fp8"}, "no kernels for fp8"),
        ({"enable_sleep_mode": True}, "[Ss]leep mode"),
        ({"attention_backend": "FLASH_ATTN"}, "pass NPU_PAGED"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(arguments: dict[str, object], sentence: str, llama: Path) -> None:
    said = start(str(llama), arguments)

    assert re.search(sentence, said), said[-3000:]


def test_mixture_of_experts_is_refused(mixture: Path) -> None:
    assert "Mixture-of-experts models have no npu kernels yet" in start(str(mixture), {})


def test_the_v2_runner_is_refused(llama: Path) -> None:
    said = start(str(llama), {}, "import os; os.environ['VLLM_USE_V2_MODEL_RUNNER'] = '1'")
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in said or "Model Runner V2 requires Triton" in said


def start(model: str, arguments: dict[str, object], before: str = "") -> str:
    """Start an engine that must fail; return what it said."""
    code = f"""{before}
from vllm import LLM
LLM(model={model!r}, skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=1 << 24, **{arguments!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "1GiB"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0, "the engine started"
    return done.stdout + done.stderr
