"""Checkpoints that vLLM's other loaders read give transformers' tokens; their packages are extras of vLLM."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

PROMPTS = models.prompt_token_ids([3, 40, 100], seed=5)
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 26,
}
SAVE = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig, tensorize_vllm_model
engine = EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True,
                    kv_cache_memory_bytes=1 << 26)
try:
    tensorize_vllm_model(engine, TensorizerConfig(tensorizer_uri=sys.argv[2]))
except Exception as error:  # the weights are written; vLLM then asks the hub for the configuration of a folder
    assert "Repo id must be in the form" in str(error)
"""


def test_run_ai_streamer(tmp_path: Path) -> None:
    pytest.importorskip("runai_model_streamer", reason="vLLM's extra runai")
    model = models.tiny_llama(tmp_path / "model")
    reference, found = load(model), run(model, tmp_path, load_format="runai_streamer")
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert_greedy(reference, prompt, output)


def test_tensorizer(tmp_path: Path) -> None:
    pytest.importorskip("tensorizer", reason="vLLM's extra tensorizer")
    model, written, bare = models.tiny_llama(tmp_path / "model"), tmp_path / "model.tensors", tmp_path / "bare"
    done = run_program(SAVE, str(model), str(written), NPU_SIMULATOR_MEMORY="1GiB")
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    uri = {"tensorizer_uri": str(written)}
    reference, found = load(model), run(bare, tmp_path, load_format="tensorizer", model_loader_extra_config=uri)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert_greedy(reference, prompt, output)


def run(model: Path, folder: Path, **engine: Any) -> list[list[int]]:
    done = run_engine(folder / "run", model, [{"prompts": PROMPTS, "sampling": GREEDY}], **SETTINGS | engine)
    assert done.platform == "npu"
    return done.tokens(0)
