"""A user's own processor of logits for the V2 runner, as vLLM's interface there wants it; see ``few_tokens``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

EVERYTHING = 1 << 30


class FewTokens(LogitsProcessor):
    """Forbids the tokens from ``extra_args["few_tokens"]`` on."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        """Make room for each request's number."""
        import torch

        self.few = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)
        self.numbers = torch.arange(req_states.vocab_size, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note a request's number; say whether it has one."""
        few = (sampling_params.extra_args or {}).get("few_tokens")
        self.few.np[req_idx] = EVERYTHING if few is None else few
        return few is not None

    def apply_staged_writes(self) -> None:
        """Bring the numbers to the device."""
        self.few.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Forbid, in place."""
        assert logits.device.type == "npu"
        few = self.few.gpu[ctx.expanded_idx_mapping]
        return logits.masked_fill_(self.numbers[None] >= few[:, None], float("-inf"))
