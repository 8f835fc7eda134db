"""Greedy tokens on npu equal transformers', whatever the model and the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

NEW = 10
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": NEW}
# 32 prompts of 1 to 1,500 tokens: shorter and longer than a block, a chunk and the sliding window, and their edges.
LENGTHS = [1500, 1, 2, 3, 15, 16, 17, 31, 32, 33, 39, 40, 41, 64, 100, 127, 128, 129, 255, 256, 257, 300, 511, 513]
LENGTHS += [5, 9, 12, 20, 48, 77, 200, 700]
# Models with all 32, one of full attention and one with windows; for the others, every second will do.
ALL_LENGTHS = ("llama", "gemma3")
ALONE = models.prompt_token_ids([23], seed=1)
SAMPLED = models.prompt_token_ids([30, 60, 90], seed=2)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1600,
    "max_num_batched_tokens": 256,  # prompts longer than this are prefilled in chunks
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "cudagraph_capture_sizes": [1, 8, 32],
}


def prompts_of(name: str) -> list[list[int]]:
    return models.prompt_token_ids(LENGTHS if name in ALL_LENGTHS else LENGTHS[::2])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    """One prompt, mixed prompts in chunks, the same again from the prefix cache, and seeded sampling twice."""
    folder = tmp_path_factory.mktemp("tokens")
    made = {name: make(folder / name) for name, make in models.MAKERS.items()}
    scenarios = []
    for name, model in made.items():
        greedy = [{"prompts": prompts, "sampling": GREEDY} for prompts in (ALONE, prompts_of(name), prompts_of(name))]
        rounds = [*greedy, *([{"prompts": SAMPLED, "sampling": SEEDED}] * 2)]
        scenarios.append({"engine": ENGINE | {"model": str(model)}, "rounds": rounds})
    return {name: (made[name], run) for name, run in zip(made, run_scenarios(folder, scenarios), strict=True)}


@pytest.mark.parametrize("name", models.MAKERS)
def test_model(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    model, run = runs[name]
    assert run.platform == "npu"
    assert run.graphs_captured > 0, "decode graphs are on by default"
    for prompts, number in ((ALONE, 0), (prompts_of(name), 1)):
        for prompt, output in zip(prompts, run.tokens(number), strict=True):
            assert len(output) == NEW
            assert_greedy(load(model), prompt, output)
    assert not any(output["cached"] for output in run.rounds[1])
    assert max(output["cached"] for output in run.rounds[2]) > 1000, "the second pass comes from the prefix cache"
    assert run.tokens(2) == run.tokens(1)
    assert run.tokens(3) == run.tokens(4), "a seed gives the same tokens again"
    assert run.tokens(3) != run.tokens(1)[:3]
