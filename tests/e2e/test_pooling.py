"""Embeddings and classes on npu equal transformers', those of the first start on a machine too."""

from __future__ import annotations

import itertools
import json
import re
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
WIDTHS = {"qwen3": 320, "sorter": 192}
POOLED = dict.fromkeys(models.ENCODERS, "first") | {"last": "last", "mean": "mean", "qwen3": "last"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    folder = tmp_path_factory.mktemp("encoders")
    # language models that are without their head; each has a width of its own, so that none finds measured what another has
    made = {
        "qwen3": models.with_tokenizer(
            models.tiny_qwen3(folder / "qwen3", hidden_size=WIDTHS["qwen3"], tie_word_embeddings=False)
        ),
        "sorter": models.tiny_sorter(folder / "sorter", labels=3, hidden_size=WIDTHS["sorter"]),
    }
    made |= {name: make(folder / name) for name, make in models.ENCODERS.items()}
    cases: dict[str, tuple[Path, dict[str, Any]]] = {name: (model, {}) for name, model in made.items()}
    cases |= {name: (made["bert"], {"pooler_config": pooler}) for name, pooler in POOLERS.items()}
    scenarios = [
        {
            "engine": SETTINGS | {"model": str(model)} | more,
            "rounds": [{"prompts": prompts, "task": task(name)} for prompts in (PROMPTS, PROMPTS[::-1])],
        }
        for name, (model, more) in cases.items()
    ]
    # where no linear layer has been measured, as on a new machine
    outcome = run_scenarios(folder, scenarios, {"VLLM_CACHE_ROOT": str(folder / "cache")})
    return {name: (cases[name][0], run) for name, run in zip(cases, outcome, strict=True)}


def task(name: str) -> str:
    """Return what is asked of a model."""
    return "classify" if name == "sorter" else "embed"


@pytest.mark.parametrize("name", POOLED)
def test_embeddings_of_mixed_batches(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    compare(run, "embedding", judges.embedder(folder, pool=POOLED[name]))


def test_classes_of_mixed_batches(runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs["sorter"]
    compare(run, "probs", judges.sorter(folder))


@pytest.mark.parametrize("name", ["qwen3", "sorter"])
def test_linear_layers_were_measured(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    measured = [
        json.loads(file.read_text())["shapes"] for file in (folder.parent / "cache" / "npu_ops").glob("linear-*.json")
    ]
    tried = re.findall(r"has not measured linear layers of (.*): others", run.log)  # beside other tests
    shapes = [*itertools.chain(*measured), *", ".join(tried).split(", ")]
    assert any(shape.endswith(f"x{WIDTHS[name]}") for shape in shapes)


def compare(run: EngineRun, field: str, judge: judges.Embedder) -> None:
    """Compare both rounds with what transformers says."""
    assert run.platform == "npu"
    for prompt, output, again in zip(PROMPTS, run.rounds[0], run.rounds[1][::-1], strict=True):
        expected = judge({"prompts": prompt})
        for answer in (output, again):
            torch.testing.assert_close(torch.tensor(answer[field]), expected, atol=2e-5, rtol=0)
