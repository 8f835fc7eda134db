"""KV caches of codes: as near to float32 as transformers in bfloat16 is, where keys and values are rounded to the codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import judges, models, truth
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.rounded_cache import rounded_cache, with_cache_scales
from tests.support.transformers_reference import load

if TYPE_CHECKING:
    from pathlib import Path

ASKED = {"prompts": models.prompt_token_ids([15, 16, 17, 31, 32, 33, 39, 40, 41, 64, 100, 127, 128, 129, 255, 300])}
SAMPLING = {"temperature": 0.0, "max_tokens": 16, "logprobs": 1}
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [16],
}
# of codes -> layers that keep the engine's dtype
EXACT: dict[str, list[int]] = {"fp8": [], "int8_per_token_head": [0, 2]}
SCALES = [(0.01, 0.02), (0.02, 0.01), (0.015, 0.005), (0.02, 0.03)]  # of each layer's keys and values
DTYPES = [pytest.param("bfloat16"), pytest.param("float16", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_qwen3(tmp_path_factory.mktemp("codes") / "model")


@pytest.fixture(scope="module", params=DTYPES)
def runs(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.dtype, dict[str, EngineRun]]:
    engine = ENGINE | {"model": str(model), "dtype": request.param}
    scenarios = [
        {
            "engine": engine | {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": [str(layer) for layer in exact]},
            "rounds": [ASKED | {"sampling": SAMPLING}],
        }
        for name, exact in EXACT.items()
    ]
    folder = tmp_path_factory.mktemp("runs")
    scaled = engine | {"model": str(with_cache_scales(folder / "scaled", model, SCALES))}
    scenarios.append({"engine": scaled, "rounds": [ASKED | {"sampling": SAMPLING}]})
    done = run_scenarios(folder, scenarios)
    return getattr(torch, request.param), dict(zip((*EXACT, "scaled"), done, strict=True))


@pytest.mark.parametrize("name", EXACT)
def test_logprobs(name: str, model: Path, runs: tuple[torch.dtype, dict[str, EngineRun]]) -> None:
    dtype, run = runs[0], runs[1][name]
    assert run.platform == "npu"
    assert run.graphs_captured
    ran = {how.rpartition(", ")[0] for how in run.implementations("Attention")}
    kept = {"npu_ops::paged_attention (cache auto)"} if EXACT[name] else set()
    assert ran == {f"npu_ops::paged_attention_quantized (cache {name})"} | kept
    exact, rounded = (
        judges.of_model(load(model, kind), cache=lambda: rounded_cache(name, EXACT[name]))
        for kind in (torch.float32, dtype)
    )
    truth.of_logprobs(exact, rounded, judges.requests(ASKED), run.rounds[0]).assert_within(1.5)


def test_scales_of_the_checkpoint(model: Path, runs: tuple[torch.dtype, dict[str, EngineRun]]) -> None:
    dtype, run = runs[0], runs[1]["scaled"]
    ran = {how.rpartition(", ")[0] for how in run.implementations("Attention")}
    assert ran == {"npu_ops::paged_attention_quantized (cache fp8)"}
    exact, rounded = (
        judges.of_model(load(model, kind), cache=lambda: rounded_cache("fp8", scales=SCALES))
        for kind in (torch.float32, dtype)
    )
    truth.of_logprobs(exact, rounded, judges.requests(ASKED), run.rounds[0]).assert_within(1.5)
