"""Quantised layers shared by tensor-parallel ranks: each rank has its part of the weights, and the scales of that part.

Engine and judge are in float32, so that nothing hides behind a dtype's noise: their logprobs differ by some 1e-6. A rank
finds the scale of what goes into a layer in its own part of it, as on any device of vLLM's, and so does the judge here:
that alone is a thousand times as much, and a wrong slice or scale more. Prompts are short and the median is taken, since
a value that lies just between two codes goes another way now and then, by up to a 16th, and all that follows with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.e2e.test_quantized import SCHEMES
from tests.e2e.test_quantized_experts import BY_TOKEN
from tests.support import judges, models, quantized, quantized_experts, truth
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.quantized import Rounding
from tests.support.quantized_experts import eight, packed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = 2
PROMPTS = models.prompt_token_ids([1, 2, 3] * 16)
SAMPLING = {"temperature": 0.0, "max_tokens": 1, "logprobs": 1}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "tensor_parallel_size": RANKS,
}
EXPERTS = [
    BY_TOKEN,
    eight("float", "block", "group", block_structure=[128, 128]),
    eight("int", "channel", "token"),
    packed(4, "group", False, group_size=64),
]


def linear_layers(folder: Path) -> Path:
    """All schemes of compressed-tensors, of a model whose layers have whole blocks of 128 on each rank."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = models.tiny_llama(folder.with_suffix(".whole"), num_hidden_layers=3, intermediate_size=512, **heads)
    return quantized.compressed(folder, {name: of for name, of in SCHEMES.items() if name != "lm_head"}, model)


def awq(folder: Path) -> Path:
    """A group for all inputs; a checkpoint that says it is symmetric, and has zero points but for those of a layer."""

    def write(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        symmetric = ".2." in name
        tensors, exact = quantized.awq_tensors(name, Rounding(group=-1, symmetric=symmetric)(weight))
        return {key: value for key, value in tensors.items() if not (symmetric and "qzeros" in key)}, exact

    config = {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": False, "version": "gemm"}
    return quantized.save(
        folder, write, config, model=models.tiny_llama(folder.with_suffix(".whole"), num_hidden_layers=3)
    )


MADE: dict[str, Callable[[Path], Path]] = {
    "linear layers": linear_layers,
    "experts": lambda folder: quantized_experts.compressed(folder, EXPERTS),
    "AWQ in channels": awq,
}
ROUND_BY_RANK = ("linear layers", "experts")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shared")
    return {name: make(folder / name.replace(" ", "-")) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    rounds = [{"prompts": PROMPTS, "sampling": SAMPLING}]
    scenarios = [{"engine": ENGINE | {"model": str(model)}, "rounds": rounds} for model in checkpoints.values()]
    environ = {"NPU_SIMULATOR_DEVICES": str(RANKS), "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return dict(zip(checkpoints, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios, environ), strict=True))


def off_by(name: str, folder: Path, run: EngineRun, ranks: int) -> float:
    """Return by how much the median logprob differs from that of a judge who rounds as so many ranks do."""
    exact = (quantized_experts if name == "experts" else quantized).exact_model(folder, torch.float32, ranks)
    judge = judges.of_model(exact)
    errors = truth.of_logprobs(judge, judge, judges.requests({"prompts": PROMPTS}), run.rounds[0])
    return errors.ours.abs().median().item()


@pytest.mark.parametrize("name", MADE)
def test_each_rank_has_its_part(name: str, checkpoints: dict[str, Path], runs: dict[str, EngineRun]) -> None:
    assert runs[name].platform == "npu"
    own, whole = (off_by(name, checkpoints[name], runs[name], ranks) for ranks in (RANKS, 1))
    assert own < 1e-5
    assert name not in ROUND_BY_RANK or whole > 1e-4
