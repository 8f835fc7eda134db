"""ReplaySSM: decodes from a state of some steps ago and the inputs since give the tokens of a state of each step.

For the night, since vLLM's Triton kernels take a minute to compile.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = models.prompt_token_ids([1, 3, 40, 100, 17, 64], seed=5)
PROGRAM = """
import json, sys, torch
from vllm import LLM, SamplingParams
folder, prompts, chosen = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(folder, dtype="float32", max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4, skip_tokenizer_init=True,
          kv_cache_memory_bytes=64 << 20, cudagraph_capture_sizes=[1, 4], **chosen)
sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
said = []
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.PrivateUse1]) as profile:
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        said.append([list(output.outputs[0].token_ids) for output in outputs])
ran = [event.name for event in profile.events() if "replayssm_output_only_kernel" in event.name]
print("SAID " + json.dumps({"ran": len(ran), "tokens": said}))
"""
WAYS: dict[str, dict[str, Any]] = {
    "graphs, and prefixes from the cache": {},
    "eager, without a cache of prefixes": {"enforce_eager": True, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_nemotron_h(tmp_path_factory.mktemp("replay") / "model")


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_replayed_states(way: str, model: Path) -> None:
    chosen = {"use_replayssm": True, "replayssm_buffer_len": 5} | WAYS[way]
    arguments = (str(model), json.dumps(PROMPTS), json.dumps(chosen))
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB", "TRITON_DEFAULT_BACKEND": "npu"}
    done = run_program(PROGRAM, *arguments, **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-4000:]
    said = json.loads(line.removeprefix("SAID "))
    assert said["ran"] > 0
    for outputs in said["tokens"]:
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert len(output) == 24
            assert_greedy(load(model), prompt, output)
