"""A user's own processor of logits, as vLLM's interface wants it: a request may choose among its first tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

if TYPE_CHECKING:
    from vllm import SamplingParams


class FewTokens(AdapterLogitsProcessor):
    """Forbids the tokens from ``extra_args["few_tokens"]`` on."""

    def is_argmax_invariant(self) -> bool:
        """Say that it changes greedy choices."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the processor of one request, or None where it asks for nothing."""
        few = (params.extra_args or {}).get("few_tokens")
        if few is None:
            return None

        def forbid(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert logits.device.type == "npu"
            logits[few:] = float("-inf")
            return logits

        return forbid

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept anything."""
