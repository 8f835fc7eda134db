"""A user's own parts for an engine, as vLLM's interfaces want them: a model, a scheduler, a loader of weights."""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class HalvedLlama(LlamaForCausalLM):
    """A Llama whose logits are half of what they were."""

    def compute_logits(self, hidden_states: Any) -> Any:
        """Return the logits."""
        logits = super().compute_logits(hidden_states)
        return None if logits is None else logits / 2


class CountingScheduler(AsyncScheduler):
    """vLLM's scheduler, which counts its steps."""

    steps = 0

    def schedule(self, *arguments: Any, **more: Any) -> Any:
        """Schedule a step."""
        type(self).steps += 1
        return super().schedule(*arguments, **more)


def register() -> None:
    """Register the model and the loader, as a general plugin does."""
    ModelRegistry.register_model("HalvedLlama", HalvedLlama)

    @register_model_loader("shouting")
    class ShoutingLoader(DefaultModelLoader):
        """vLLM's loader, which says that it is there."""

        def __init__(self, load_config: Any) -> None:
            load_config.load_format = "safetensors"
            super().__init__(load_config)
            print("the user's loader", flush=True)
