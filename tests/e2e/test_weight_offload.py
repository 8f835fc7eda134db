"""Weights that stay in host memory give the tokens of weights on the device, and the device holds fewer bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = models.prompt_token_ids([3, 40, 100], seed=5)
PROGRAM = """
import gc, json, sys, torch
from vllm import LLM, SamplingParams
folder, prompts, chosen = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(folder, dtype="float32", max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4, skip_tokenizer_init=True,
          kv_cache_memory_bytes=16 << 20, cudagraph_capture_sizes=[4], **chosen)
held = torch.npu.memory_allocated()
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
print("SAID " + json.dumps({"held": held, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}))
"""
WAYS: dict[str, dict[str, Any]] = {
    "ahead": {
        "offload_backend": "prefetch",
        "offload_group_size": 2,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    },
    "one kind of weights": {"offload_group_size": 2, "offload_params": ["gate_up_proj", "down_proj"]},
    "read where they are": {"cpu_offload_gb": 0.01},
    "one kind, read where it is": {"offload_backend": "uva", "cpu_offload_gb": 1, "cpu_offload_params": ["down_proj"]},
    "ahead, eager": {"offload_group_size": 2, "offload_prefetch_step": 1, "enforce_eager": True},
}
QUICK = ("ahead", "read where they are")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("offload") / "model", num_hidden_layers=6)


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, Any]:
    return run(model, {})


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.nightly]) for way in WAYS]
)
def test_offloaded_weights(way: str, model: Path, whole: dict[str, Any]) -> None:
    found = run(model, WAYS[way])
    assert found["held"] < whole["held"] - (1 << 19)
    reference = load(model)
    for prompt, output in zip(PROMPTS, found["tokens"], strict=True):
        assert_greedy(reference, prompt, output)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["ahead", "ahead, eager"])
def test_weights_copied_ahead_on_the_v2_runner(way: str, model: Path) -> None:
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    whole, found = run(model, {}, **environ), run(model, WAYS[way], **environ)
    assert found["held"] < whole["held"] - (1 << 19)
    assert found["tokens"] == whole["tokens"]


def run(model: Path, chosen: dict[str, Any], **environ: str) -> dict[str, Any]:
    arguments = (str(model), json.dumps(PROMPTS), json.dumps(chosen))
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"} | environ
    done = run_program(PROGRAM, *arguments, **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(line.removeprefix("SAID "))
    return said
