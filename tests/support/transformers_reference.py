"""What transformers says about a continuation: the judge of every greedy test."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path


@cache
def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return the checkpoint as a transformers model on the CPU; eager attention, which knows the soft cap."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def next_token_logprobs(model: torch.nn.Module, prompt: list[int], output: list[int], **kept: Any) -> torch.Tensor:
    """Return float32 [len(output), vocabulary]: the model's logprobs at each step of this continuation.

    `kept`: further arguments of the model, such as the cache that it is to keep keys and values in.
    """
    ids = torch.tensor([prompt + output[:-1]])
    logits = model(ids, **kept).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)


def assert_greedy(model: torch.nn.Module, prompt: list[int], output: list[int]) -> None:
    """Assert that each token of `output` is the model's own greedy choice after what precedes it."""
    logprobs = next_token_logprobs(model, prompt, output)
    expected = logprobs.argmax(-1).tolist()
    wrong = [step for step, (a, b) in enumerate(zip(expected, output, strict=True)) if a != b]
    assert not wrong, (
        f"prompt of {len(prompt)} tokens: step {wrong[0]} chose {output[wrong[0]]} "
        f"(logprob {logprobs[wrong[0], output[wrong[0]]]:.4f}), transformers {expected[wrong[0]]} "
        f"({logprobs[wrong[0]].max():.4f}); {len(wrong)} of {len(output)} steps differ"
    )
