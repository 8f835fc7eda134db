"""Embeddings of encoders on npu equal transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import judges, models
from tests.support.engine_run import EngineRun, run_engines

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = models.prompt_token_ids([1, 2, 5, 15, 16, 17, 33, 100, 300, 500])
SETTINGS = {"runner": "pooling", "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    folder = tmp_path_factory.mktemp("encoders")
    made = {name: make(folder / name) for name, make in models.ENCODERS.items()}
    outcome = run_engines(folder, list(made.values()), [{"prompts": PROMPTS}, {"prompts": PROMPTS[::-1]}], **SETTINGS)
    return {name: (made[name], run) for name, run in zip(made, outcome, strict=True)}


@pytest.mark.parametrize("name", models.ENCODERS)
def test_embeddings_of_mixed_batches(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    assert run.platform == "npu"
    embed = judges.embedder(folder)
    for prompt, output, again in zip(PROMPTS, run.rounds[0], run.rounds[1][::-1], strict=True):
        expected = embed({"prompts": prompt})
        for answer in (output, again):
            torch.testing.assert_close(torch.tensor(answer["embedding"]), expected, atol=2e-5, rtol=0)
