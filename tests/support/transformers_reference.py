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


@torch.inference_mode()
def sure_of_experts(model: torch.nn.Module, prompt: list[int], output: list[int], margin: float = 1e-4) -> torch.Tensor:
    """Return bool [len(output)]: at which steps every router prefers its last expert to the next one by `margin`.

    Elsewhere the last bits of a processor's arithmetic choose the expert, and either choice is right. A model without
    experts is always sure.
    """
    sure = torch.ones(len(output), dtype=torch.bool)

    def look(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])[len(prompt) - 1 :]
        logits = torch.nn.functional.linear(rows, router.weight, getattr(router, "bias", None))
        chances = logits.softmax(-1).sort(-1, descending=True).values
        last = model.config.num_experts_per_tok - 1
        sure.logical_and_(chances[:, last] - chances[:, last + 1] > margin)

    routers = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    hooks = [router.register_forward_hook(look) for router in routers]
    model(torch.tensor([prompt + output[:-1]]))
    for hook in hooks:
        hook.remove()
    return sure


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
