"""A class of a user's own that drafts: speculation by ``custom_class`` imports it in the engine's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig

__all__ = ["Echo"]


class Echo:
    """Drafts the tokens that a request said so many places ago, in its prompt at first."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read how many drafts are wanted."""
        assert vllm_config.speculative_config is not None
        self._number = vllm_config.speculative_config.num_speculative_tokens

    def propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Return drafts for each request that has said something in this step; vLLM's interface."""
        return [
            token_ids[row, max(0, end - self._number) : end].tolist() if said else []
            for row, (said, end) in enumerate(zip(sampled, num_tokens[: len(sampled)].tolist(), strict=True))
        ]
