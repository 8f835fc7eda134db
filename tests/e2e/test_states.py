"""Models whose layers keep a state of fixed size: greedy tokens equal transformers', through vLLM's engine on npu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import models
from tests.support.engine_run import EngineRun, run_engine, run_engines
from tests.support.transformers_reference import assert_greedy, load, next_token_logprobs

if TYPE_CHECKING:
    from pathlib import Path

NEW = 8
# More prompts than requests at a time, longer and shorter than a step's 64 tokens: decodes beside first and later chunks.
PROMPTS = models.prompt_token_ids([23, 1, 2, 3, 64, 65, 150, 5, 17, 100])
# Conversations that go on, and part: two share as many tokens as two blocks of any of these models hold.
SHARED, *TAILS = models.prompt_token_ids([290, 9, 40], seed=1)
FIRST, SECOND = [SHARED + TAILS[0]], [SHARED + TAILS[1], SHARED + TAILS[0] + TAILS[1]]
ECHO = {"method": "custom_class", "model": "tests.support.proposers.Echo", "num_speculative_tokens": 3}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enable_prefix_caching": True,  # which vLLM leaves off where all layers keep states
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [2, 4],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    """Chunked prompts, mixed batches, requests in slots that others left, decode graphs with padding."""
    folder = tmp_path_factory.mktemp("states")
    made = {name: make(folder / name) for name, make in models.RECURRENT.items()}
    sampling = {"temperature": 0.0, "max_tokens": NEW}
    # one token by itself looks like a decode, in a slot that another request left
    rounds = [
        {"prompts": prompts, "sampling": sampling}
        for prompts in (PROMPTS, PROMPTS[1:2], FIRST, SECOND, PROMPTS + FIRST)
    ]
    outcome = run_engines(folder, list(made.values()), rounds, **ENGINE)
    return {name: (made[name], run) for name, run in zip(made, outcome, strict=True)}


@pytest.mark.parametrize("name", models.RECURRENT)
def test_greedy_tokens(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    model, run = runs[name]
    assert run.platform == "npu"
    assert run.graphs_captured > 0
    reference = load(model)
    assert run.tokens(1) == run.tokens(0)[1:2]
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(reference, prompt, output)


@pytest.mark.parametrize("name", models.RECURRENT)
def test_states_of_prefixes_are_cached(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    model, run = runs[name]
    reference = load(model)
    assert max(output["cached"] for output in run.rounds[2]) == 0
    cached = [output["cached"] for output in run.rounds[3] + run.rounds[4][-1:]]
    assert min(cached) > 0, cached
    for prompts, tokens in zip((FIRST, SECOND, PROMPTS + FIRST), map(run.tokens, (2, 3, 4)), strict=True):
        for prompt, output in zip(prompts, tokens, strict=True):
            assert_greedy(reference, prompt, output)


@pytest.mark.parametrize(
    ("settings", "environ"),
    [({"block_size": 64}, {}), ({"enable_prefix_caching": False}, {}), ({"block_size": 64}, V1)],
    ids=["blocks", "off", "V1"],
)
def test_other_blocks_and_none(settings: dict[str, Any], environ: dict[str, str], tmp_path: Path) -> None:
    """V1 copies states by a body of npu's, V2 by vLLM's own kernels."""
    model = models.tiny_granite_hybrid(tmp_path / "model")
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}} for prompts in (FIRST, SECOND)]
    run = run_engine(tmp_path, model, rounds, environ, **ENGINE | settings)
    assert run.runner == "V1" or not environ
    assert (max(output["cached"] for output in run.rounds[1]) > 0) == ("block_size" in settings)
    for prompt, output in zip(SECOND, run.tokens(1), strict=True):
        assert_greedy(load(model), prompt, output)


@pytest.mark.parametrize(
    ("settings", "environ"),
    [({}, {}), ({}, V1), ({"speculative_config": ECHO}, {})],
    ids=["V2", "V1", "drafts"],
)
def test_prefixes_end_within_a_block(settings: dict[str, Any], environ: dict[str, str], tmp_path: Path) -> None:
    """A block of states is copied for whoever goes on from the middle of it."""
    model = models.tiny_granite_hybrid(tmp_path / "model")
    rounds = [
        {"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}} for prompts in (FIRST, SECOND, FIRST)
    ]
    whole, finer = (
        run_engine(tmp_path / name, model, rounds, environ, **ENGINE | settings | {"block_size": 128} | unit)
        for name, unit in (("whole", {}), ("finer", {"prefix_match_unit": 16}))
    )
    for run in (whole, finer):
        for prompts, tokens in zip((FIRST, SECOND, FIRST), map(run.tokens, range(3)), strict=True):
            for prompt, output in zip(prompts, tokens, strict=True):
                assert_greedy(load(model), prompt, output)
    cached = [[output["cached"] for output in run.rounds[1] + run.rounds[2]] for run in (whole, finer)]
    assert all(more >= fewer > 0 for fewer, more in zip(*cached, strict=True)), cached
    assert max(number % 128 for number in cached[1]) > 0, cached


def test_states_wider_than_the_model(tmp_path: Path) -> None:
    """A model in bfloat16 with its states in float32 is as near to float32 as transformers in bfloat16."""
    model = models.tiny_mamba(tmp_path / "model")
    rounds = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW, "logprobs": 1}}]
    wide = {"dtype": "bfloat16", "mamba_cache_dtype": "float32", "mamba_ssm_cache_dtype": "float32"}
    run = run_engine(tmp_path, model, rounds, **ENGINE | wide)
    exact, rounded = load(model), load(model, torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(PROMPTS, run.rounds[0], strict=True):
        chosen = (torch.arange(NEW), torch.tensor(output["tokens"]))
        truth = next_token_logprobs(exact, prompt, output["tokens"])[chosen]
        ours.append(torch.tensor(output["logprobs"]) - truth)
        theirs.append(next_token_logprobs(rounded, prompt, output["tokens"])[chosen] - truth)
    ours, theirs = (torch.cat(errors).square().mean().sqrt().item() for errors in (ours, theirs))
    assert ours <= 1.5 * theirs, f"rms error {ours:.4f}, transformers in bfloat16 {theirs:.4f}"
