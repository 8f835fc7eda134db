"""Imported by the process that tests are forks of: vLLM then knows the models that tests ask for, as on a machine that
has served them.

What it does not know yet it looks at in yet another process, which imports vLLM for it, and keeps what it saw in its
cache. On a new machine that took ten seconds for each such model; a fork of a process that has vLLM does the same in one.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import traceback
from pathlib import Path

from vllm import ModelRegistry
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.plugins import load_general_plugins

ARCHITECTURES = (
    # of servers
    "LlamaForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    # that draft
    "DeepSeekMTPModel",
    "Eagle3LlamaForCausalLM",
    "EagleLlamaForCausalLM",
    "MedusaModel",
    "Qwen3NextMTP",
    # whose settings are refused; mamba's is left to vLLM's own way
    "BertModel",
    "DeepseekV2ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "KimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "OlmoHybridForCausalLM",
)


def know(architectures: tuple[str, ...]) -> None:
    """Write into vLLM's cache what it would have seen of those that it does not know."""
    models = (ModelRegistry.models.get(name) for name in architectures)  # vLLM 0.33 has fewer
    lazy = [model for model in models if isinstance(model, _LazyRegisteredModel)]
    versions = [(model, model._get_modelinfo_module_hash(_file(model.module_name))) for model in lazy]
    unknown = [(model, version) for model, version in versions if model._load_modelinfo_from_cache(version) is None]
    if unknown:
        load_general_plugins()
    for model, version in unknown:
        model._save_modelinfo_to_cache(_ModelInfo.from_model_cls(model.load_model_cls()), version)


def _file(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


def _in_a_fork() -> None:
    """Leave this process without the models' modules, which its forks are to import themselves."""
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        assert status == 0, "the models of tests/support/known_models.py"
        return
    status = 1
    try:
        gc.disable()
        logging.disable(logging.WARNING)  # what vLLM warns of is said where the models are used
        know(ARCHITECTURES)
        status = 0
    except BaseException:  # noqa: BLE001 as the interpreter does
        traceback.print_exc()
    finally:
        os._exit(status)


_in_a_fork()
