"""What a request can ask for and what a user can bring, on npu: answers are transformers' or follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import models
from tests.support.transformers_reference import load, next_token_logprobs
from tests.support.vllm_process import run_program

pytestmark = pytest.mark.nightly

PROMPTS = models.prompt_token_ids([5, 40, 130], seed=8)
NEW = 6
NEAR = 1e-3
CHOSEN = ("few", "allowed", "biased", "without")
PROCESSORS = {"V1": "tests.support.few_tokens:FewTokens", "V2": "tests.support.few_tokens_v2:FewTokens"}
SETTINGS = """
import json, sys
sys.path.insert(0, ".")
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
asked = [{"prompt_token_ids": ids} for ids in prompts]
settings = dict(model=folder, dtype="float32", max_model_len=256, max_num_batched_tokens=64, max_num_seqs=8,
                skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26)
base = dict(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
said = {"platform": current_platform.device_type}
def tokens(outputs):
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]
"""
ASKED = """
settings["skip_tokenizer_init"] = False  # beam search asks for one
llm = LLM(**settings, max_logprobs=20, scheduling_policy="priority", logits_processors=[sys.argv[3]])
said["V2"] = llm.llm_engine.vllm_config.use_v2_model_runner
def ask(**more):
    return llm.generate(asked, SamplingParams(**base | more), use_tqdm=False)
plain = ask()
said["plain"] = tokens(plain)
first = [output.outputs[0].token_ids[0] for output in plain]
said["prompt_logprobs"] = [
    [next(iter(step.values())).logprob for step in output.prompt_logprobs[1:]] for output in ask(prompt_logprobs=0)
]
said["several"] = tokens(ask(n=3, temperature=1.0, seed=5))
said["several again"] = tokens(ask(n=3, temperature=1.0, seed=5))
said["few"] = tokens(ask(extra_args={"few_tokens": 300}))
said["allowed"] = tokens(ask(allowed_token_ids=[7, 11, 900]))
said["first"] = first
said["without"] = tokens(ask(bad_words=[f"w{token}" for token in first]))
said["biased"] = tokens(ask(logit_bias={42: 100.0}))
said["stopped"] = [output.outputs[0].finish_reason for output in ask(stop_token_ids=first)]
said["not yet"] = tokens(ask(stop_token_ids=first, min_tokens=4))
said["penalised"] = tokens(ask(max_tokens=30, presence_penalty=2.0, repetition_penalty=2.0))
import vllm.sampling_params as sp
said["urgent"] = tokens(llm.generate(asked, SamplingParams(**base), use_tqdm=False, priority=[2, 1, 0]))
beams = llm.beam_search(asked, sp.BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
said["beams"] = [[[list(one.tokens), one.cum_logprob] for one in output.sequences] for output in beams]
print("SAID " + json.dumps(said))
"""
BROUGHT = """
from tests.support import users_parts
users_parts.register()
def run(**more):
    llm = LLM(**settings | more)
    outputs = llm.generate(asked, SamplingParams(**base, logprobs=0), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    steps = [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids)] for one in
             (output.outputs[0] for output in outputs)]
    return tokens(outputs), steps
said["plain"] = run()
said["model"] = run(hf_overrides={"architectures": ["HalvedLlama"]})
said["scheduler"] = run(scheduler_cls="tests.support.users_parts.CountingScheduler")
said["steps"] = users_parts.CountingScheduler.steps
said["loader"] = run(load_format="shouting")
said["dummy"] = run(load_format="dummy")
print("SAID " + json.dumps(said))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.with_tokenizer(models.tiny_llama(tmp_path_factory.mktemp("requests") / "model"))


@pytest.fixture(scope="module", params=PROCESSORS)
def asked(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a processor of logits is written for decides which of vLLM's runners the engine has."""
    said = ask(ASKED, folder, PROCESSORS[request.param])[0]
    assert said["V2"] == (request.param == "V2")
    return said


def ask(program: str, folder: Path, *more: str) -> tuple[dict[str, Any], str]:
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "2GiB"}
    done = run_program(SETTINGS + program, str(folder), json.dumps(PROMPTS), *more, **environ)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stderr[-4000:]
    said = json.loads(line.removeprefix("SAID "))
    assert said["platform"] == "npu"
    return said, done.stdout


def test_logprobs_of_prompts(asked: dict[str, Any], folder: Path) -> None:
    for prompt, said in zip(PROMPTS, asked["prompt_logprobs"], strict=True):
        truth = next_token_logprobs(load(folder), prompt[:1], prompt[1:])
        expected = truth.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(said), expected, atol=NEAR, rtol=0)


def test_several_answers_of_a_request(asked: dict[str, Any]) -> None:
    assert asked["several"] == asked["several again"]
    assert all(len({tuple(one) for one in answers}) == 3 for answers in asked["several"])


def test_beams_have_their_own_sum_and_begin_with_the_best(asked: dict[str, Any], folder: Path) -> None:
    for prompt, beams in zip(PROMPTS, asked["beams"], strict=True):
        assert len(beams) == 3
        sums = [total for _, total in beams]
        assert sums == sorted(sums, reverse=True)
        for ids, total in beams:
            answer = ids[len(prompt) :]
            truth = next_token_logprobs(load(folder), prompt, answer)
            expected = truth.gather(1, torch.tensor(answer)[:, None]).sum().item()
            assert total == pytest.approx(expected, abs=4 * NEAR)


def test_what_tokens_may_be_chosen(asked: dict[str, Any]) -> None:
    flat = {name: {token for (answer,) in asked[name] for token in answer} for name in CHOSEN}
    assert max(flat["few"]) < 300
    assert flat["allowed"] <= {7, 11, 900}
    assert flat["biased"] == {42}
    assert flat["without"].isdisjoint(asked["first"])
    assert all(len(set(answer)) == 30 for (answer,) in asked["penalised"]), "twos would be dear"


def test_ends_of_answers(asked: dict[str, Any]) -> None:
    assert asked["stopped"] == ["stop"] * len(PROMPTS)
    assert all(len(answer) >= 4 for (answer,) in asked["not yet"])
    assert asked["urgent"] == asked["plain"]


def test_a_users_own_model_scheduler_and_loader(folder: Path) -> None:
    said, log = ask(BROUGHT, folder)
    assert said["model"][0] == said["plain"][0]
    assert said["model"][1] != said["plain"][1], "half the logits, but the best is the same"
    assert said["steps"] > NEW
    assert said["scheduler"] == said["plain"]
    assert "the user's loader" in log
    assert said["loader"] == said["plain"]
    assert said["dummy"][0] != said["plain"][0]
