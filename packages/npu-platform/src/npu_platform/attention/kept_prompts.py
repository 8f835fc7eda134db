"""R-SWA, the attention of Unlimited-OCR: an answer's tokens see the whole prompt, and a window of the answer.

The mask of a token at q, behind a prompt of p tokens, is causal and (key < p or q - key < window). So prompts, and
answers until they are longer than the window, are causal as usual. A later token sees two runs of keys, the prompt and
its window: it is a request of its own in two passes, which are joined by the logs of their sums. The blocks between the
runs are freed by vLLM's ``RSWAManager``, and are not read. Upstream interface: ``CommonAttentionMetadata``'s
``rswa_prefix_lens``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["KeptPrompts", "TwoRuns"]


@dataclass
class TwoRuns:
    """Tokens of a step, each a request of its own that sees two runs of keys; all tensors are on the device."""

    rows: torch.Tensor | None
    """int64 [tokens]: their places in the batch; None: they are the whole batch."""
    query_start_loc: torch.Tensor
    """int32 [tokens + 1]: 0, 1, 2 and so on."""
    block_table: torch.Tensor
    """int32 [tokens, blocks]."""
    first: torch.Tensor
    """int32 [tokens]: the length of the first run, from the first key on: the prompt, or all that there is."""
    second: torch.Tensor
    """int32 [tokens]: where the second run ends, which is as long as the window; 0: there is none."""
    window: int
    """How many keys a token sees of the answer, its own included."""


class KeptPrompts:
    """Makes :class:`TwoRuns` of each step; steps that may be recorded get the same memory each time."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, window: int) -> None:
        """Make room for the tokens of a recorded step; for their blocks when the first step tells how many."""
        self._window = window
        self._most_of_decodes = 1 + vllm_config.num_speculative_tokens
        most = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._table: torch.Tensor | None = None

    def of(self, common: CommonAttentionMetadata) -> TwoRuns | None:
        """Return the tokens that may see two runs: all of a step that may be recorded, None where there are none."""
        device = common.query_start_loc.device
        if common.max_query_len <= self._most_of_decodes:
            number = torch.arange(common.num_actual_tokens, dtype=torch.int32, device=device)
            return self._runs(common, None, number)
        places = torch.tensor(list(self._late_rows(common)), dtype=torch.int64)
        if not len(places):
            return None
        rows = places.to(device)
        return self._runs(common, rows, rows.int())

    def _late_rows(self, common: CommonAttentionMetadata) -> Iterator[int]:
        """Yield the rows that see two runs; lengths are upper bounds where tokens are drafted, so some may not."""
        starts, prompts = common.query_start_loc_cpu.tolist(), _prompts(common).tolist()
        bound = common.seq_lens_cpu_upper_bound
        lengths = (common.seq_lens.cpu() if bound is None else bound).tolist()
        for request, prompt in enumerate(prompts):
            start, end = starts[request], starts[request + 1]
            late = lengths[request] - self._window - prompt
            yield from range(max(start, end - max(late, 0)), end)

    def _runs(self, common: CommonAttentionMetadata, rows: torch.Tensor | None, number: torch.Tensor) -> TwoRuns:
        starts, lengths = common.query_start_loc, common.seq_lens
        request = torch.searchsorted(starts[1:], number, right=True).clamp_(max=lengths.shape[0] - 1)
        # Padding behind the last request sees nothing.
        seen = (lengths[request] - starts[1:][request] + number + 1) * (number < starts[-1])
        prompt = _prompts(common).to(device=seen.device, dtype=torch.int32)[request.clamp(max=common.num_reqs - 1)]
        has_gap = seen - self._window > prompt
        first, second = torch.where(has_gap, prompt, seen), seen * has_gap
        where = self._kept(common.block_table_tensor, request, first, second) if rows is None else None
        if where is None:
            alone = torch.arange(len(number) + 1, dtype=torch.int32, device=number.device)
            where = alone, common.block_table_tensor[request], first, second
        return TwoRuns(rows, *where, self._window)

    def _kept(
        self, table: torch.Tensor, request: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the values in the memory that a recording reads; None for more than a recording has."""
        tokens = len(request)
        if tokens > self._lengths.shape[1]:
            return None
        if self._table is None:
            self._table = table.new_zeros(self._lengths.shape[1], table.shape[1])
        torch.index_select(table, 0, request, out=self._table[:tokens])
        runs = self._lengths[0, :tokens].copy_(first), self._lengths[1, :tokens].copy_(second)
        return self._starts[: tokens + 1], self._table[:tokens], *runs


def _prompts(common: CommonAttentionMetadata) -> torch.Tensor:
    """Return the length of each request's prompt, [requests]; zeros while a graph is captured without requests."""
    given = common.rswa_prefix_lens
    if given is None:
        return torch.zeros(common.num_reqs, dtype=torch.int32)
    return torch.nn.functional.pad(given, (0, max(0, common.num_reqs - len(given))))
