"""Embeddings of encoders on npu equal transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import judges, models
from tests.support.engine_run import EngineRun, run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = models.prompt_token_ids([1, 2, 5, 15, 16, 17, 33, 100, 300, 500])
SETTINGS = {"runner": "pooling", "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 1024}
POOLERS: dict[str, dict[str, Any]] = {
    "last": {"pooling_type": "LAST"},
    "mean": {"seq_pooling_type": "MEAN", "use_activation": False},  # of any length
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    folder = tmp_path_factory.mktemp("encoders")
    made = {name: make(folder / name) for name, make in models.ENCODERS.items()}
    cases: dict[str, tuple[Path, dict[str, Any]]] = {name: (model, {}) for name, model in made.items()}
    cases |= {name: (made["bert"], {"pooler_config": pooler}) for name, pooler in POOLERS.items()}
    rounds = [{"prompts": PROMPTS}, {"prompts": PROMPTS[::-1]}]
    scenarios = [
        {"engine": SETTINGS | {"model": str(model)} | more, "rounds": rounds} for model, more in cases.values()
    ]
    outcome = run_scenarios(folder, scenarios)
    return {name: (cases[name][0], run) for name, run in zip(cases, outcome, strict=True)}


@pytest.mark.parametrize("name", [*models.ENCODERS, *POOLERS])
def test_embeddings_of_mixed_batches(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    assert run.platform == "npu"
    embed = judges.embedder(folder, pool=name if name in POOLERS else "first")
    for prompt, output, again in zip(PROMPTS, run.rounds[0], run.rounds[1][::-1], strict=True):
        expected = embed({"prompts": prompt})
        for answer in (output, again):
            torch.testing.assert_close(torch.tensor(answer["embedding"]), expected, atol=2e-5, rtol=0)
