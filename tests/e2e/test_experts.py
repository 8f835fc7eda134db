"""Greedy tokens of mixture-of-experts models on npu equal transformers', on one device and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = {"temperature": 0.0, "max_tokens": 10}
# Prompts of some tokens an expert and of many, one of them prefilled in two chunks.
PROMPTS = models.prompt_token_ids([300, 1, 2, 17, 40, 41, 64, 129, 5, 9, 12, 200])
ROUNDS = [{"prompts": prompts, "sampling": GREEDY} for prompts in (PROMPTS, PROMPTS[:1])]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 16],
}
ONE_DEVICE = {"mixtral": {}, "gpt_oss": {}, "glm4_moe": {"enforce_eager": True}}
TWO_DEVICES = {"qwen3_moe": {}, "glm4_moe": {"enable_expert_parallel": True}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return {name: make(folder / name) for name, make in models.MIXTURES.items()}


@pytest.fixture(scope="module")
def on_one(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    return run(made, ONE_DEVICE, tmp_path_factory.mktemp("one"), {})


@pytest.fixture(scope="module")
def on_two(
    made: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EngineRun]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["name"] for item in items}
    cases = {name: {"tensor_parallel_size": 2} | settings for name, settings in TWO_DEVICES.items() if name in asked}
    devices = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}
    return run(made, cases, tmp_path_factory.mktemp("two"), devices)


def run(
    made: dict[str, Path], cases: dict[str, dict[str, Any]], folder: Path, environ: dict[str, str]
) -> dict[str, EngineRun]:
    engines = [ENGINE | settings | {"model": str(made[name])} for name, settings in cases.items()]
    outcome = run_scenarios(folder, [{"engine": engine, "rounds": ROUNDS} for engine in engines], environ)
    return dict(zip(cases, outcome, strict=True))


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_tokens(name: str, made: dict[str, Path], on_one: dict[str, EngineRun]) -> None:
    check(on_one[name], made[name])
    assert (on_one[name].graphs_captured > 0) == ("enforce_eager" not in ONE_DEVICE[name])
    assert on_one[name].implementations("RoutedExperts")


@pytest.mark.parametrize("name", [pytest.param("qwen3_moe", marks=pytest.mark.nightly), "glm4_moe"])
def test_tokens_on_two_devices(name: str, made: dict[str, Path], on_two: dict[str, EngineRun]) -> None:
    check(on_two[name], made[name])


@pytest.mark.nightly
def test_every_other_expert_on_a_device(made: dict[str, Path], tmp_path: Path) -> None:
    """vLLM places experts so where a model chooses among groups of them, and says where it does not."""
    placed = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin", "tensor_parallel_size": 2}
    devices = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"}
    outcome = run(made, {"glm4_moe": placed}, tmp_path, devices)["glm4_moe"]
    check(outcome, made["glm4_moe"])
    assert "Expert placement strategy: round_robin" in outcome.log
    assert "Falling back to linear expert placement" not in outcome.log


def check(outcome: EngineRun, model: Path) -> None:
    """Assert that all tokens are transformers', the first prompt's by itself the same as among the others."""
    assert outcome.platform == "npu"
    assert outcome.tokens(1) == outcome.tokens(0)[:1]
    for prompt, output in zip(PROMPTS, outcome.tokens(0), strict=True):
        assert len(output) == GREEDY["max_tokens"]
        assert_greedy(load(model), prompt, output)
