"""A user's own processor of what goes in and comes out, as vLLM's interface wants it: prompts by their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.inputs import PromptType
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams


class Lengths(IOProcessor[list[int], dict[str, Any]]):
    """Asks for the embedding of a prompt of each length, and answers with the embeddings by length."""

    def parse_data(self, data: object) -> list[int]:
        """Return the lengths that the request asks for."""
        assert isinstance(data, list), data
        self.asked = [int(length) for length in data]
        return self.asked

    def pre_process(self, prompt: list[int], request_id: str | None = None, **more: Any) -> Sequence[PromptType]:
        """Return a prompt of each length."""
        return [{"prompt_token_ids": list(range(3, 3 + length))} for length in prompt]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Ask for embeddings."""
        return PoolingParams(task="embed")

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return each length with its embedding."""
        rows = [output.outputs.data.float().tolist() for output in model_output]
        return {str(length): row for length, row in zip(self.asked, rows, strict=True)}


def lengths() -> str:
    """Name the class, as an entry point of vllm.io_processor_plugins does."""
    return f"{__name__}.{Lengths.__name__}"
