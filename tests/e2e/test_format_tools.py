"""Quantised checkpoints that the formats' own tools made (`nox -s format_tools`): logprobs beside transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import judges, quantized, tool_checkpoints, truth
from tests.support.engine_run import EngineRun, run_scenarios

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not tool_checkpoints.PYTHON.exists(), reason="nox -s format_tools makes the tools' environment"),
]

PROMPTS = quantized.prompts(4) + quantized.unsure_prompts(12)
ROUNDS = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}}]
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [16],
}
INTEGERS = "npu_ops::weight_only_linear ({} in {})".format
FP8 = "npu_ops::fp8_linear ({})".format
RUNS = {
    "llm-compressor GPTQ W4A16": INTEGERS("uint4b8", "groups of 128"),
    "llm-compressor W8A16": INTEGERS("uint8b128", "groups of 128"),
    "llm-compressor W4A8": INTEGERS("int4", "groups of 128"),
    "llm-compressor W8A8": "npu_ops::int8_linear (dynamic activations)",
    "llm-compressor FP8": FP8("blocks of 256 x 512, rounded activations"),
    "llm-compressor FP8_DYNAMIC": FP8("blocks of 1 x 256, rounded activations"),
    "llm-compressor FP8_BLOCK": FP8("blocks of 128 x 128, rounded activations"),
    "llm-compressor NVFP4A16": "npu_ops::weight_only_linear (nvfp4)",
    "llm-compressor NVFP4": "npu_ops::weight_only_linear (nvfp4)",
    "llm-compressor MXFP4A16": "npu_ops::weight_only_linear (mxfp4)",
    "llm-compressor MXFP8": "npu_ops::weight_only_linear (mxfp8)",
    "ModelOpt FP8": FP8("blocks of 256 x 512, rounded activations"),
    "ModelOpt FP8 by channel": FP8("blocks of 1 x 256, rounded activations"),
    "ModelOpt FP8 by block": FP8("blocks of 128 x 128, rounded activations"),
    "ModelOpt NVFP4": "npu_ops::weight_only_linear (nvfp4)",
    "ModelOpt MXFP8": "npu_ops::weight_only_linear (mxfp8)",
    "AutoRound GPTQ": INTEGERS("uint4b8", "groups of 64"),
    "AutoRound": INTEGERS("uint4b8", "groups of 64"),
    "AutoRound with zero points": INTEGERS("uint4", "groups of 64"),
    "AutoRound AWQ": INTEGERS("uint4", "groups of 64"),
    "bitsandbytes NF4": "npu_ops::linear",
    "bitsandbytes FP4": "npu_ops::linear",
    "bitsandbytes int8": "npu_ops::linear",
}
"""What a layer runs, by the checkpoint's name in tests.support.format_tools."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tool_checkpoints.make(tmp_path_factory.mktemp("made"), list(RUNS))


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    scenarios = [{"engine": ENGINE | {"model": str(folder)}, "rounds": ROUNDS} for folder in checkpoints.values()]
    return dict(zip(checkpoints, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint(name: str, checkpoints: dict[str, Path], runs: dict[str, EngineRun]) -> None:
    """As near to what the checkpoint means, in float32, as transformers is in bfloat16."""
    run = runs[name]
    assert run.platform == "npu"
    assert RUNS[name] in {how.rpartition(", ")[0] or how for how in run.implementations("ParallelLinear")}
    exact, rounded = (
        judges.of_model(quantized.exact_model(checkpoints[name], dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    errors = truth.of_logprobs(exact, rounded, [{"prompts": prompt} for prompt in PROMPTS], run.rounds[0])
    errors.assert_within(1.5)
