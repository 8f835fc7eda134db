"""Prompts of latent attention need no more memory than vLLM's profile has kept, however long their context is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support import models
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 64  # of the projections that the profile is told to have kept room for; a model's own are 64 Ki
LENGTHS = [400, 800, 1600]
CHUNK = 200
PROGRAM = """
import json, sys
import torch
from vllm import LLM, SamplingParams

model, cache, rows, chunk, prompts = json.loads(sys.argv[1])
llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=16,
    max_num_batched_tokens=chunk, max_num_seqs=2, kv_cache_memory_bytes=64 << 20, kv_cache_dtype=cache,
    enable_prefix_caching=False)

def keep_room_for_few_rows(worker):
    for layer in worker.compilation_config.static_forward_context.values():
        layer._chunked_prefill_workspace_size = rows

def workspaces(worker):
    builders = [group.get_metadata_builder() for groups in worker.model_runner.attn_groups for group in groups]
    return [builder.chunked_prefill_workspace.numel() for builder in builders]

llm.collective_rpc(keep_room_for_few_rows)
peaks, tokens = [], []
for prompt in prompts:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    tokens.append(list(output.outputs[0].token_ids))
    peaks.append(torch.npu.max_memory_allocated() - before)
print("SAID " + json.dumps([peaks, tokens, llm.collective_rpc(workspaces)[0]]))
llm.llm_engine.engine_core.shutdown()
"""


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_memory_does_not_grow_with_the_context(cache: str, tmp_path: Path) -> None:
    model, prompts = models.tiny_deepseek_v2(tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    arguments = json.dumps([str(model), cache, ROWS, CHUNK, prompts])
    environ = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "NPU_SIMULATOR_MEMORY": "2GiB",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    done = run_program(PROGRAM, arguments, **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    peaks, tokens, workspaces = json.loads(line.removeprefix("SAID "))
    assert max(peaks) < 1.05 * min(peaks), peaks
    assert workspaces == [0]
    if cache == "auto":
        for prompt, output in zip(prompts, tokens, strict=True):
            assert_greedy(load(model), prompt, output)
