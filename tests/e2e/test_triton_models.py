"""Models whose layers run vLLM's own Triton kernels: as near to float32 truth as transformers' own in bfloat16.

For the night, since the kernels of an empty cache take a minute or two to compile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine_run import run_scenarios
from tests.support.families import BY_TRITON

ENVIRON = {"TRITON_DEFAULT_BACKEND": "npu"}


@pytest.mark.nightly
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", BY_TRITON)
def test_family(name: str, eager: bool, tmp_path: Path) -> None:
    family = BY_TRITON[name]
    model = family.make(tmp_path / name)
    asked = family.round(model)
    engine = family.engine | {"model": str(model), "dtype": "bfloat16", "enforce_eager": eager}
    # twice, so that prompts come from the prefix cache
    (run,) = run_scenarios(tmp_path, [{"engine": engine, "rounds": [asked, asked]}], ENVIRON)
    assert run.platform == "npu"
    assert bool(run.graphs_captured) is not eager
    for outputs in run.rounds:
        family.assert_true(model, torch.bfloat16, asked, outputs)
