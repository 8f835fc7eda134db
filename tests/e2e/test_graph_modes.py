"""vLLM's own switches for graphs and compilation: each gives transformers' greedy tokens, and captures what it says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, SIZES = 2, [1, 2, 8]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": SIZES,
}
PROMPTS = models.prompt_token_ids([1, 2, 3, 17, 40, 300])
NEW = 8
EAGER = {"mode": 3, "backend": "eager"}
INDUCTOR = {"mode": 3, "backend": "inductor"}
PIECES = LAYERS + 1
# Name -> compilation_config and the graphs that are captured.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({"cudagraph_mode": "FULL"}, len(SIZES)),
    "pieces": ({"cudagraph_mode": "PIECEWISE"}, PIECES * len(SIZES)),
    "full-and-pieces": ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, (PIECES + 1) * len(SIZES)),
}
SLOW: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({"cudagraph_mode": "NONE"}, 0),
    "decode": ({"cudagraph_mode": "FULL_DECODE_ONLY"}, len(SIZES)),
    "eager-none": (EAGER | {"cudagraph_mode": "NONE"}, 0),
    "eager-whole": (EAGER | {"cudagraph_mode": "FULL", "splitting_ops": []}, len(SIZES)),
    "eager-decode": (EAGER | {"cudagraph_mode": "FULL_DECODE_ONLY"}, len(SIZES)),
    "inductor-none": (INDUCTOR | {"cudagraph_mode": "NONE"}, 0),
    "inductor-pieces": (INDUCTOR | {"cudagraph_mode": "FULL_AND_PIECEWISE"}, (PIECES + 1) * len(SIZES)),
    "inductor-sizes": (INDUCTOR | {"cudagraph_mode": "FULL_DECODE_ONLY", "compile_sizes": [8]}, len(SIZES)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # with biases, which compiled code takes as it does weights
    return models.tiny_llama(tmp_path_factory.mktemp("modes") / "model", num_hidden_layers=LAYERS, attention_bias=True)


def run(model: Path, folder: Path, modes: dict[str, tuple[dict[str, Any], int]]) -> dict[str, EngineRun]:
    rounds = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}}] * 2
    scenarios = [
        {"engine": {"model": str(model)} | ENGINE | {"compilation_config": config}, "rounds": rounds}
        for config, _ in modes.values()
    ]
    environ = {"VLLM_CACHE_ROOT": str(folder / "cache")}
    return dict(zip(modes, run_scenarios(folder, scenarios, environ), strict=True))


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    return run(model, tmp_path_factory.mktemp("runs"), MODES)


@pytest.fixture(scope="module")
def slow_runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    return run(model, tmp_path_factory.mktemp("slow"), SLOW)


def check(model: Path, run: EngineRun, graphs: int) -> None:
    assert run.graphs_captured == graphs
    for number in range(2):
        for prompt, output in zip(PROMPTS, run.tokens(number), strict=True):
            assert_greedy(load(model), prompt, output)


@pytest.mark.parametrize("name", MODES)
def test_mode(name: str, model: Path, runs: dict[str, EngineRun]) -> None:
    check(model, runs[name], MODES[name][1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SLOW)
def test_more_modes(name: str, model: Path, slow_runs: dict[str, EngineRun]) -> None:
    check(model, slow_runs[name], SLOW[name][1])


def test_the_log_says_what_was_captured(runs: dict[str, EngineRun]) -> None:
    log = runs["full"].log  # of the whole process
    said = [int(number) for number in re.findall(r"npu graphs: (\d+) captured in [\d.]+ s, hold [\d.]+ MiB", log)]
    assert said == [graphs for _, graphs in MODES.values()]
    assert "Capturing npu graphs" in log
    assert "Capturing CUDA graphs" not in log
