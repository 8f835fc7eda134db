"""Asks vLLM for engine configurations on npu, many in one process, and brings back what each was refused with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers

from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

__all__ = ["configure", "configured", "mixture_of_experts", "run"]

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


def configure(cases: dict[str, dict[str, Any]], **environ: str) -> dict[str, str]:
    """Return what each case's engine arguments are refused with, or "accepted"."""
    done = run(_CONFIGURE, {name: _SMALL | arguments for name, arguments in cases.items()}, **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    return json.loads(line.removeprefix("SAID "))


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
