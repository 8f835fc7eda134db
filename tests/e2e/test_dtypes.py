"""Every family of models in bfloat16 and float16: as near to float32 truth as transformers' own in that dtype.

CI takes nearly each family in bfloat16, which is the default, and a few in float16; the others are for the night.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.families import FAMILIES

FLOAT16_BY_DAY = ("llama", "mixtral", "granite_hybrid")
# Each has its like by day: Llama's layers with norms of queries (Gemma 3's), biases and positions (BLOOM's, BERT's), experts
# (Mixtral's, GLM's), another eye (Qwen2.5-VL's), another encoder (BERT's). Their tokens in float32 are looked at by day.
BFLOAT16_BY_NIGHT = ("qwen3", "gpt2", "qwen3_moe", "llava", "qwen3-vl", "modernbert")
# vLLM refuses Gemma in it as numerically unstable. GLM-4-MoE is wrong in it on every platform: vLLM's MoERunner leaves out
# routed_scaling_factor where there are shared experts, and the model does not divide its residuals by it, as DeepSeek's does.
WITHOUT_FLOAT16 = ("gemma2", "gemma3", "glm4_moe")
BFLOAT16 = [
    pytest.param("bfloat16", name, marks=pytest.mark.nightly if name in BFLOAT16_BY_NIGHT else []) for name in FAMILIES
]
FLOAT16 = [
    pytest.param("float16", name, marks=[] if name in FLOAT16_BY_DAY else pytest.mark.nightly)
    for name in FAMILIES
    if name not in WITHOUT_FLOAT16
]
Runs = dict[str, tuple[Path, EngineRun]]


@pytest.fixture(scope="module")
def runs_in(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """Runs the families that this session asks for in a dtype, one engine after the other in one process, once."""
    done: dict[str, Runs] = {}
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]

    def runs(dtype: str) -> Runs:
        if dtype not in done:
            names = [params["name"] for params in asked if params["dtype"] == dtype]
            done[dtype] = run_families(names, dtype, tmp_path_factory.mktemp(dtype))
        return done[dtype]

    return runs


def run_families(names: list[str], dtype: str, folder: Path) -> Runs:
    made = {name: FAMILIES[name].make(folder / name) for name in names}
    scenarios = [
        {
            "engine": FAMILIES[name].engine | {"model": str(model), "dtype": dtype},
            "rounds": [FAMILIES[name].round(model)],
        }
        for name, model in made.items()
    ]
    return {name: (made[name], run) for name, run in zip(made, run_scenarios(folder, scenarios), strict=True)}


@pytest.mark.parametrize(("dtype", "name"), [*BFLOAT16, *FLOAT16])
def test_family(dtype: str, name: str, runs_in: Callable[[str], Runs]) -> None:
    (folder, run), family = runs_in(dtype)[name], FAMILIES[name]
    assert run.platform == "npu"
    assert family.embeds or run.graphs_captured
    family.assert_true(folder, getattr(torch, dtype), family.round(folder), run.rounds[0])
