"""Prompts as embeddings, and a user's own processor of logits, on npu."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support import models
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

NEW, FORBIDDEN = 6, 1000
LENGTHS = [1, 17, 40, 300]
# of each of vLLM's runners, of which an engine with such a processor has the right one
PROCESSORS = {"V1": "tests.support.few_tokens:FewTokens", "V2": "tests.support.few_tokens_v2:FewTokens"}
PROGRAM = """
import json, sys, torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
table = load_file(folder + "/model.safetensors")["model.embed_tokens.weight"]
settings = dict(dtype="float32", max_model_len=512, max_num_batched_tokens=128, max_num_seqs=8, skip_tokenizer_init=True,
                kv_cache_memory_bytes=64 << 20, enable_prompt_embeds=True,
                logits_processors=[sys.argv[5]])
llm = LLM(folder, **settings)
greedy = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True, detokenize=False)
few = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True, detokenize=False,
                     extra_args={"few_tokens": int(sys.argv[4])})
asked = [{"prompt_embeds": table[ids]} for ids in prompts] + [{"prompt_token_ids": ids} for ids in prompts]
outputs = llm.generate(asked + asked[-1:], [greedy] * len(asked) + [few], use_tqdm=False)
tokens = [list(output.outputs[0].token_ids) for output in outputs]
v2 = llm.llm_engine.vllm_config.use_v2_model_runner
print("SAID " + json.dumps({"platform": current_platform.device_type, "V2": v2, "tokens": tokens}))
"""


@pytest.mark.parametrize("runner", [pytest.param("V1", marks=pytest.mark.nightly), "V2"])
def test_embeddings_of_prompts_and_a_users_own_processor(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of ids, of embeddings and with fewer tokens to choose from share the batch, prefilled in chunks."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)  # which `nox -s v1` sets: npu is to choose
    model, prompts = models.tiny_llama(tmp_path / "model"), models.prompt_token_ids(LENGTHS)
    arguments = (str(model), json.dumps(prompts), str(NEW), str(FORBIDDEN), PROCESSORS[runner])
    done = run_program(PROGRAM, *arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0", NPU_SIMULATOR_MEMORY="2GiB")
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-3000:]
    said = json.loads(line.removeprefix("SAID "))
    assert (said["platform"], said["V2"]) == ("npu", runner == "V2")
    *tokens, few = said["tokens"]
    reference = load(model)
    for prompt, output in zip(prompts * 2, tokens, strict=True):
        assert_greedy(reference, prompt, output)
    assert max(few) < FORBIDDEN <= max(tokens[-1])
