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
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
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
    rounds = [{"prompts": prompts, "sampling": sampling} for prompts in (PROMPTS, PROMPTS[1:2])]
    outcome = run_engines(folder, list(made.values()), rounds, **ENGINE)
    return {name: (made[name], run) for name, run in zip(made, outcome, strict=True)}


@pytest.mark.parametrize("name", models.RECURRENT)
def test_greedy_tokens(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    model, run = runs[name]
    assert run.platform == "npu"
    assert run.graphs_captured > 0
    assert "Prefix caching is off" in run.log
    reference = load(model)
    assert run.tokens(1) == run.tokens(0)[1:2]
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(reference, prompt, output)


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
