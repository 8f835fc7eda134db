"""Batch-invariant mode: the same bits of the logits whatever shares a batch, however a prompt is cut and cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models, multimodal, quantized_experts
from tests.support.engine_run import EngineRun, run_engine, run_engines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
SAMPLING = {"temperature": 0.0, "max_tokens": 8, "logprobs": 1}
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 640,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
PROMPTS = models.prompt_token_ids([300, 1, 33, 513, 40, 129], seed=8)
MODELS: dict[str, Callable[[Path], Path]] = {
    "gemma3": models.tiny_gemma3,
    "deepseek": models.tiny_deepseek_v2,
    "granite": models.tiny_granite_hybrid,
    "qwen3-next": models.tiny_qwen3_next,
    "experts": lambda folder: quantized_experts.compressed(
        folder, [quantized_experts.eight("float", "channel", "token"), quantized_experts.packed(4, "channel")]
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """Each prompt alone, then twice all of them, whose chunks end anywhere, the second time after hits in the cache."""
    folder = tmp_path_factory.mktemp("invariant")
    made = {name: make(folder / name) for name, make in MODELS.items()}
    outcome = run_engines(folder, list(made.values()), rounds_of(PROMPTS), INVARIANT, **ENGINE)
    return dict(zip(made, outcome, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_text(name: str, runs: dict[str, EngineRun]) -> None:
    run = runs[name]
    check(run, PROMPTS)
    assert run.graphs_captured
    has_states = name in ("granite", "qwen3-next")
    assert has_states or max(output["cached"] for output in run.rounds[-1]) > 400


def test_images(tmp_path: Path) -> None:
    folder = multimodal.tiny_qwen2_5_vl(tmp_path / "model")
    prompts = [[1, 4, multimodal.IMAGE_TOKEN, 5, 20], [1, 7, 4, multimodal.IMAGE_TOKEN, 5, 20, 30], [1, 20, 30]]
    seen = {"seen": [0, 2, None]}
    settings = ENGINE | {
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
        "skip_tokenizer_init": False,
        "mm_processor_cache_gb": 0,
    }
    check(run_engine(tmp_path, folder, rounds_of(prompts, seen), INVARIANT, **settings), prompts)


def test_embeddings(tmp_path: Path) -> None:
    folder = models.tiny_bert(tmp_path / "model")
    prompts = models.prompt_token_ids([1, 2, 33, 100, 300])
    rounds = [{"prompts": one["prompts"]} for one in rounds_of(prompts)]
    settings = {"runner": "pooling", "dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 1024}
    check(run_engine(tmp_path, folder, rounds, INVARIANT, **settings), prompts)


def rounds_of(prompts: list[list[int]], media: dict[str, list[int | None]] | None = None) -> list[dict[str, Any]]:
    """Return each prompt alone, and twice all of them."""

    def one(indices: list[int]) -> dict[str, Any]:
        values = {"prompts": prompts, **(media or {})}
        return {"sampling": SAMPLING, **{name: [of[i] for i in indices] for name, of in values.items()}}

    everything = list(range(len(prompts)))
    return [*(one([i]) for i in everything), one(everything), one(everything)]


def check(run: EngineRun, prompts: list[list[int]]) -> None:
    """Assert that each prompt got in the last two rounds what it got alone, to the bit."""
    assert run.platform == "npu"
    alone = [one for (one,) in run.rounds[: len(prompts)]]
    for together in run.rounds[len(prompts) :]:
        for output, same in zip(together, alone, strict=True):
            assert {**output, "cached": 0} == {**same, "cached": 0}
