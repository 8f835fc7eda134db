"""Mixtures of experts from quantised checkpoints: tokens and logprobs beside transformers' on the dequantised weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import models, quantized_experts
from tests.support.engine_run import run_engine
from tests.support.quantized import Rounding
from tests.support.quantized_experts import eight, packed
from tests.support.transformers_reference import load, next_token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEW = 8
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
}


def fp8(_: str, weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int8(_: str, weight: torch.Tensor) -> torch.Tensor:
    wide = weight.bfloat16()  # as the engine holds it
    scale = wide.abs().amax(1, keepdim=True) / 127
    return (wide / scale).round().float() * scale.float()


# checkpoint, and by how much the errors may exceed transformers' own in bfloat16 (rounded activations do)
CASES: dict[str, tuple[Callable[[Path], Path], float, dict[str, Any]]] = {
    "awq": (lambda folder: quantized_experts.awq(folder, Rounding(group=32, symmetric=False)), 2.0, {}),
    "gptq": (lambda folder: quantized_experts.gptq(folder, Rounding(group=64)), 2.0, {}),
    "packed": (
        lambda folder: quantized_experts.compressed(
            folder,
            [packed(4, "group", False, group_size=32), packed(4, "channel"), packed(8, "group", group_size=64)],
        ),
        2.0,
        {},
    ),
    "eight-bits": (
        lambda folder: quantized_experts.compressed(
            folder,
            [
                eight("int", "channel", "token"),
                eight("float", "channel", "token"),
                eight("float", "tensor", "tensor"),
                eight("float", "block", "group", block_structure=[128, 128]),
            ],
        ),
        8.0,
        {},
    ),
    "fp8-online": (
        lambda folder: quantized_experts.unquantized(folder, fp8, 2),
        8.0,
        {"quantization": "online", "quantization_config": {"moe": "fp8_per_channel"}},
    ),
    "int8-online": (
        lambda folder: quantized_experts.unquantized(folder, int8, 2),
        2.0,
        {"quantization": "int8_per_channel_weight_only"},
    ),
    "gpt-oss": (quantized_experts.gpt_oss, 2.0, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_checkpoint(name: str, tmp_path: Path) -> None:
    make, factor, settings = CASES[name]
    checkpoint = make(tmp_path / "model")
    prompts = models.prompt_token_ids([90, 1, 7, 17, 40, 5])
    sampling = {"temperature": 0.0, "max_tokens": NEW, "logprobs": 1}
    run = run_engine(tmp_path / "run", checkpoint, [{"prompts": prompts, "sampling": sampling}], **ENGINE | settings)
    assert run.platform == "npu"
    exact, rounded = (load(checkpoint / "exact", dtype) for dtype in (torch.float32, torch.bfloat16))
    ours, theirs, lost, steps = [], [], [], torch.arange(NEW)
    for prompt, output in zip(prompts, run.rounds[0], strict=True):
        tokens = torch.tensor(output["tokens"])
        truth = next_token_logprobs(exact, prompt, output["tokens"])
        noise = next_token_logprobs(rounded, prompt, output["tokens"])
        ours.append(torch.tensor(output["logprobs"]) - truth[steps, tokens])
        theirs.append(noise[steps, tokens] - truth[steps, tokens])
        lost.append(truth.max(-1).values - truth[steps, tokens])
    our_error, their_error = (torch.cat(errors).square().mean().sqrt().item() for errors in (ours, theirs))
    worst = torch.cat(lost).max().item()
    print(
        f"{name}: rms {our_error:.4f}, transformers in bfloat16 {their_error:.4f}, at most {worst:.4f} below the best token"
    )
    assert our_error <= factor * their_error, f"rms error {our_error:.4f}, transformers in bfloat16 {their_error:.4f}"
    # Another token than the exact model's is right only where both are as good: two errors apart, each of three rms.
    assert worst <= 6 * our_error, f"a token {worst:.4f} below the exact model's was chosen; rms error {our_error:.4f}"
