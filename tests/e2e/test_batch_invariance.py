"""Batch-invariant mode: the same bits of the logits whatever shares a batch, however a prompt is cut and cached.

And the right ones: what is the same everywhere is as near to float32 truth as transformers' own in bfloat16. Those of
BY_DAY run in CI, the others at night.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import judges, models, quantized_experts
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.families import FAMILIES, Family

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 640,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
SEEING = {"max_model_len": 256, "max_num_batched_tokens": 512, "mm_processor_cache_gb": 0}
ENCODING = {"max_model_len": 512, "max_num_batched_tokens": 1024}
PROMPTS = {"prompts": models.prompt_token_ids([300, 1, 33, 513, 40, 129], seed=8)}
EXPERTS = Family(
    lambda folder: quantized_experts.compressed(
        folder, [quantized_experts.eight("float", "channel", "token"), quantized_experts.packed(4, "channel")]
    ),
    lambda folder, dtype: judges.of_model(quantized_experts.exact_model(folder, dtype)),
    chooses=True,
)
TEXT = {name: FAMILIES[name] for name in ("gemma3", "deepseek_v2", "granite_hybrid", "qwen3_next")} | {
    "experts": EXPERTS
}
OTHERS = {"qwen2.5-vl": SEEING, "bert": ENCODING}
MODELS = TEXT | {name: FAMILIES[name] for name in OTHERS}
BY_DAY = ("gemma3", "granite_hybrid", "experts")
CASES = [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in MODELS]


def asked(name: str, folder: Path) -> dict[str, Any]:
    return (
        PROMPTS | {"sampling": {"temperature": 0.0, "max_tokens": 8, "logprobs": 1}}
        if name in TEXT
        else MODELS[name].round(folder)
    )


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, EngineRun]]:
    """Each prompt alone, then twice all of them, whose chunks end anywhere, the second time after hits in the cache."""
    folder = tmp_path_factory.mktemp("invariant")
    wanted = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    made = {name: family.make(folder / name) for name, family in MODELS.items() if name in wanted}
    scenarios = [
        {
            "engine": MODELS[name].engine | ENGINE | OTHERS.get(name, {}) | {"model": str(model)},
            "rounds": alone_and_together(asked(name, model)),
        }
        for name, model in made.items()
    ]
    outcome = run_scenarios(folder, scenarios, {"VLLM_BATCH_INVARIANT": "1"})
    return {name: (made[name], run) for name, run in zip(made, outcome, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_in_any_company(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    folder, run = runs[name]
    assert run.platform == "npu"
    assert MODELS[name].embeds or run.graphs_captured
    count = len(asked(name, folder)["prompts"])
    alone = [one for (one,) in run.rounds[:count]]
    for together in run.rounds[count:]:
        for output, same in zip(together, alone, strict=True):
            assert {**output, "cached": 0} == {**same, "cached": 0}
    if name in ("gemma3", "deepseek_v2", "experts"):  # those with states have no prefix cache
        assert max(output["cached"] for output in run.rounds[-1]) > 400


@pytest.mark.parametrize("name", CASES)
def test_they_are_right(name: str, runs: dict[str, tuple[Path, EngineRun]]) -> None:
    (folder, run), family = runs[name], MODELS[name]
    family.assert_true(folder, torch.bfloat16, asked(name, folder), run.rounds[-1])


def alone_and_together(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a round for each request of one, and that one twice."""
    inputs = {key: values for key, values in one.items() if key != "sampling"}
    others = {key: one[key] for key in one.keys() - inputs.keys()}
    alone = [others | {key: [values[i]] for key, values in inputs.items()} for i in range(len(one["prompts"]))]
    return [*alone, one, one]
