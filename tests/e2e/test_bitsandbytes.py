"""Checkpoints of bitsandbytes over several ranks, with adapters, and of experts: tokens of the dequantised model's.

What the tool itself makes is judged by `nox -s format_tools`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models, quantized
from tests.support.adapters import adapter
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly
NEW = 8
PROMPTS = models.prompt_token_ids([60, 17, 1, 43], seed=3)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 32 << 20,
    "cudagraph_capture_sizes": [1, 4],
}
RANKS: dict[str, dict[str, Any]] = {
    "one device": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}
MODELS = {"dense": models.tiny_llama, "experts": models.tiny_qwen3_moe}
TWO = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", quantized.BITSANDBYTES)
def test_ranks(form: str, kind: str, ranks: str, tmp_path: Path) -> None:
    model = quantized.bitsandbytes(tmp_path / "quantised", form, MODELS[kind](tmp_path / "model"))
    rounds = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    run = run_engine(tmp_path, model, rounds, TWO, **ENGINE | RANKS[ranks])
    exact = load(model / "exact")
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(exact, prompt, output)


@pytest.mark.parametrize("ranks", ["one device", "TP 2"])
@pytest.mark.parametrize("form", quantized.BITSANDBYTES)
def test_adapters(form: str, ranks: str, tmp_path: Path) -> None:
    """As with the dequantised model on one device, which transformers judges elsewhere."""
    model = quantized.bitsandbytes(tmp_path / "quantised", form, models.tiny_llama(tmp_path / "model"))
    layers = ["q_proj", "v_proj", "o_proj", "down_proj"]
    made = str(adapter(tmp_path / "adapter", load(model / "exact"), layers, 8, seed=1))
    lora = [made if number % 2 else None for number in range(len(PROMPTS))]
    rounds = [{"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}, "lora": lora}]
    engine = ENGINE | {"enable_lora": True, "max_lora_rank": 8}
    expected = run_engine(tmp_path / "exact", model / "exact", rounds, TWO, **engine)
    found = run_engine(tmp_path / "found", model, rounds, TWO, **engine | RANKS[ranks])
    assert found.tokens(0) == expected.tokens(0)
    without = run_engine(tmp_path / "without", model, [rounds[0] | {"lora": None}], TWO, **engine)
    assert [one == other for one, other in zip(found.tokens(0), without.tokens(0), strict=True)] == [True, False] * 2
