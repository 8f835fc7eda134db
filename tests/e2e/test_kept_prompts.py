"""R-SWA, the attention of Unlimited-OCR: answers see the whole prompt and a window of themselves, as a mask would say.

Its language model without experts is Llama's, so transformers' Llama with that mask is the judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import load, next_token_logprobs

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = 7
NEW = 40
PROMPTS = models.prompt_token_ids([1, 2, 5, 16, 23, 70, 130, 9], seed=3)
ROUND = {"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 32,  # so that prompts are computed beside answers
    "max_num_seqs": 4,
    "block_size": 4,  # blocks between prompt and window are given back
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 2, 4],
    "enable_prefix_caching": False,  # as vLLM does for Unlimited-OCR
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "interrupted": {
        "num_gpu_blocks_override": 50,
        "max_model_len": 180,
    },  # answers are computed again with their prompts
    "drafts": {"speculative_config": DRAFTS, "cudagraph_capture_sizes": [4, 8, 16]},
}
QUICK = ("interrupted",)  # with graphs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = {"architectures": ["DeepseekForCausalLM"], "rswa_window": WINDOW, "head_dim": 32}
    experts = {"n_routed_experts": None, "n_shared_experts": None, "first_k_dense_replace": 0}
    return models.tiny_llama(tmp_path_factory.mktemp("kept") / "model", **special | experts)


@pytest.fixture(scope="module")
def quick(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    scenarios = [{"engine": ENGINE | WAYS[way] | {"model": str(model)}, "rounds": [ROUND]} for way in QUICK]
    return dict(zip(QUICK, run_scenarios(tmp_path_factory.mktemp("quick"), scenarios), strict=True))


@pytest.mark.parametrize("way", QUICK)
def test_answers_see_a_window_of_themselves(way: str, model: Path, quick: dict[str, EngineRun]) -> None:
    check(model, quick[way])
    assert quick[way].graphs_captured
    assert bool(quick[way].metrics["vllm:num_preemptions"]) is (way == "interrupted")


@pytest.mark.nightly
@pytest.mark.parametrize("way", [way for way in WAYS if way not in QUICK])
def test_other_ways(way: str, model: Path, tmp_path: Path) -> None:
    check(
        model, run_scenarios(tmp_path, [{"engine": ENGINE | WAYS[way] | {"model": str(model)}, "rounds": [ROUND]}])[0]
    )


@pytest.mark.nightly
def test_second_runner(model: Path, tmp_path: Path) -> None:
    scenario = {"engine": ENGINE | {"model": str(model)}, "rounds": [ROUND]}
    check(model, run_scenarios(tmp_path, [scenario], {"VLLM_USE_V2_MODEL_RUNNER": "1"})[0])


def check(folder: Path, run: EngineRun) -> None:
    """Assert that the tokens are those of the mask, and not those of a model that sees all of its answer."""
    assert run.platform == "npu"
    judge = load(folder)
    whole = []
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        seen = mask(len(prompt), len(prompt) + NEW - 1)
        assert next_token_logprobs(judge, prompt, output, attention_mask=seen).argmax(-1).tolist() == output
        whole.append(next_token_logprobs(judge, prompt, output).argmax(-1).tolist() == output)
    assert not any(whole)


def mask(prompt: int, length: int) -> torch.Tensor:
    """Return what is added to the scores, [1, 1, length, length]."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= query) & ((key < prompt) | (query - key < WINDOW))
    return torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
