"""Classes of a user's own that draft: speculation by ``custom_class`` imports them in the engine's process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig

__all__ = ["Echo", "Known"]


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


class Known(Echo):
    """Drafts what goes on in the texts of the file ``KNOWN_TEXTS``, and at every seventh place another token."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read the texts."""
        super().__init__(vllm_config)
        self._texts: list[list[int]] = json.loads(Path(os.environ["KNOWN_TEXTS"]).read_text())

    def propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Return drafts for each request that has said something in this step; vLLM's interface."""
        ends = num_tokens[: len(sampled)].tolist()
        return [
            self._after(token_ids[row, :end].tolist()) if said else []
            for row, (said, end) in enumerate(zip(sampled, ends, strict=True))
        ]

    def _after(self, text: list[int]) -> list[int]:
        end = len(text)
        known = next((known for known in self._texts if known[:end] == text), [])[end : end + self._number]
        return [token ^ 1 if place % 7 == 0 else token for place, token in enumerate(known, start=end)]
