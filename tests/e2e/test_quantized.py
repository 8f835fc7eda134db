"""Quantised checkpoints of a trained model, on disk as their makers write them: tokens and logprobs beside transformers'.

Transformers runs the dequantised weights, and rounds activations where the checkpoint says so. The checkpoints of a
format family differ from layer to layer, so that one engine runs several schemes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import quantized
from tests.support.engine_run import run_engine
from tests.support.quantized import Rounding
from tests.support.transformers_reference import next_token_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEW = 12
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 << 20,
}


def integers(bits: int, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, **more}


def packed(*arguments: Any, **more: Any) -> dict[str, Any]:
    return {"weights": integers(*arguments, **more), "format": "pack-quantized"}


def eight_bits(weights: str, inputs: str, symmetric: bool) -> dict[str, Any]:
    activations = integers(8, inputs, symmetric, dynamic=inputs == "token")
    return {"weights": integers(8, weights), "input_activations": activations, "format": "int-quantized"}


def floats(weights: str, inputs: str | None, **more: Any) -> dict[str, Any]:
    base = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = {"weights": {**base, "strategy": weights, **more}, "format": "float-quantized"}
    if inputs is not None:
        size = {"group_size": 128} if inputs == "group" else {}
        scheme["input_activations"] = {**base, "strategy": inputs, "dynamic": inputs != "tensor", **size}
    return scheme


MXFP4 = {
    "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
    "format": "mxfp4-pack-quantized",
}
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "awq": lambda folder: quantized.awq(folder, Rounding(group=64, symmetric=False)),
    "gptq": lambda folder: quantized.gptq(folder, Rounding(group=128), head=True),
    "gptq-order": lambda folder: quantized.gptq(folder, Rounding(group=32, symmetric=False, order=True)),
    "compressed": lambda folder: quantized.compressed(
        folder,
        {
            # fused layers have one scheme: three layers of four
            r".*\.0\.self_attn\.[qkv]_proj": packed(4, "group", group_size=32),
            r".*\.0\.self_attn\.o_proj": MXFP4,
            r".*\.0\.mlp\.(gate|up)_proj": packed(4, "group", False, group_size=128),
            r".*\.0\.mlp\.down_proj": packed(8, "group", group_size=64),
            r".*\.1\.self_attn\.[qkv]_proj": eight_bits("channel", "token", True),
            r".*\.1\.self_attn\.o_proj": eight_bits("channel", "token", False),
            r".*\.1\.mlp\.(gate|up)_proj": eight_bits("tensor", "tensor", True),
            r".*\.1\.mlp\.down_proj": eight_bits("channel", "tensor", False),
            r".*\.2\.self_attn\.[qkv]_proj": floats("channel", "token"),
            r".*\.2\.self_attn\.o_proj": floats("tensor", "tensor"),
            r".*\.2\.mlp\.(gate|up)_proj": floats("block", "group", block_structure=[128, 128]),
            r".*\.2\.mlp\.down_proj": floats("channel", None),
            "lm_head": packed(4, "channel"),
        },
    ),
    "fp8-blocks": quantized.fp8_blocks,
    "fp8-online": lambda folder: quantized.online(folder, *ONLINE),
    "int8-online": quantized.online_int8,
}
ONLINE = {
    r".*\.0\..*_proj": "fp8_per_tensor",
    r".*\.1\..*_proj": "fp8_per_channel",
    r".*\.2\..*_proj": "fp8_per_block",
}
MORE: dict[str, dict[str, Any]] = {
    "int8-online": {"quantization": "npu_int8"},
    "fp8-online": {
        "quantization": "online",
        "quantization_config": {"targets": {f"re:{layers}": name for layers, name in ONLINE.items()}},
    },
}


RUNS = {
    "gptq": ("x NpuParallelLMHead", "npu_ops::weight_only_linear (uint4b8 in groups of 128)"),
    "compressed": (
        "npu_ops::weight_only_linear (mxfp4)",
        "npu_ops::int8_linear (static",
        "npu_ops::fp8_linear (blocks of 128 x 128, rounded",
    ),
    "int8-online": ("npu_ops::weight_only_linear (int8 by channel)",),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, tmp_path: Path) -> None:
    """A prompt alone and several together; as near to the exact weights in float32 as transformers' own bfloat16."""
    checkpoint = CHECKPOINTS[name](tmp_path / "model")
    prompts = quantized.prompts(12)
    sampling = {"temperature": 0.0, "max_tokens": NEW, "logprobs": 1}
    rounds = [{"prompts": prompts[:1], "sampling": sampling}, {"prompts": prompts, "sampling": sampling}]
    run = run_engine(tmp_path / "run", checkpoint, rounds, **ENGINE, **MORE.get(name, {}))
    assert run.platform == "npu"
    assert run.tokens(0) == run.tokens(1)[:1]
    for implementation in RUNS.get(name, ()):  # as the worker's log says
        assert implementation in run.log
    exact, rounded = quantized.exact_model(checkpoint), quantized.exact_model(checkpoint, torch.bfloat16)
    ours, theirs, wrong = [], [], 0
    for prompt, output in zip(prompts, run.rounds[1], strict=True):
        tokens = torch.tensor(output["tokens"])
        truth = next_token_logprobs(exact, prompt, output["tokens"])
        noise = next_token_logprobs(rounded, prompt, output["tokens"])
        steps = torch.arange(NEW)
        ours.append(torch.tensor(output["logprobs"]) - truth[steps, tokens])
        theirs.append(noise[steps, tokens] - truth[steps, tokens])
        wrong += int((truth.argmax(-1) != tokens).sum())
    our_error, their_error = (torch.cat(errors).square().mean().sqrt().item() for errors in (ours, theirs))
    assert our_error <= 1.5 * their_error, f"rms error {our_error:.4f}, transformers in bfloat16 {their_error:.4f}"
    assert wrong <= 0.02 * NEW * len(prompts), f"{wrong} tokens are not the exact model's"
