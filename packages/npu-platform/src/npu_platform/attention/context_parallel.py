"""Decode context parallelism: attention over a KV cache of which each rank of a group holds every n-th token.

Each rank attends to the tokens that it holds with the queries of all ranks' heads; what the ranks find is joined by the
logs of their sums (as the parts of flash decoding, Dao et al. 2023), and then with a step's own tokens, whose keys and
values each rank has in hand. Upstream interface: ``vllm.v1.attention.ops.dcp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = [
    "ContextLengths",
    "Part",
    "TokensAlone",
    "Where",
    "exchange_ranks",
    "gather_heads",
    "join",
    "join_ranks",
    "joining",
]

Part = tuple[torch.Tensor, torch.Tensor]
"""What attention to some of the keys found: [tokens, heads, dim], and the logs of the sums, float32 [tokens, heads]."""

Where = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What says which keys a step's queries see: int32 block table [requests, blocks], starts and lengths of requests."""


class ContextLengths:
    """How many tokens of each request this rank holds from before a step; the same memory in each step, for graphs."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Make room for all requests of a step."""
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    def of(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Return int32 [requests]."""
        group = get_dcp_group()
        before = common.seq_lens - common.query_start_loc.diff()
        here = get_dcp_local_seq_lens(before, group.world_size, group.rank_in_group, self._interleave)
        lengths = self._lengths[: common.num_reqs]
        lengths.copy_(here.clamp_(min=0))
        return lengths


class TokensAlone:
    """Makes of each token of a step a request of its own, which sees what this rank holds of the tokens up to it.

    Those are no run of the request's tokens, so that no mask by position would do. Steps that may be recorded get the
    same memory each time.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Make room for the tokens of a recorded step; for their blocks when the first step tells how many."""
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        most = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._table: torch.Tensor | None = None

    def of(self, where: Where, tokens: int) -> Where:
        """Return such requests for a step's first tokens; `where` has the whole lengths of its requests."""
        table, starts, lengths = where
        number = torch.arange(tokens, dtype=torch.int32, device=starts.device)
        request = torch.searchsorted(starts[1:], number, right=True).clamp_(max=lengths.shape[0] - 1)
        # Padding behind the last request sees nothing.
        seen = (lengths[request] - starts[1:][request] + number + 1) * (number < starts[-1])
        group = get_dcp_group()
        here = get_dcp_local_seq_lens(seen, group.world_size, group.rank_in_group, self._interleave)
        if tokens > self._lengths.shape[0]:
            return table[request], torch.arange(tokens + 1, dtype=torch.int32, device=starts.device), here
        if self._table is None:
            self._table = table.new_zeros(self._lengths.shape[0], table.shape[1])
        kept = self._table[:tokens], self._starts[: tokens + 1], self._lengths[:tokens]
        torch.index_select(table, 0, request, out=kept[0])
        kept[2].copy_(here)
        return kept


def gather_heads(query: torch.Tensor) -> torch.Tensor:
    """Return the queries [tokens, heads of all ranks, dim] for this rank's [tokens, heads, dim]."""
    return get_dcp_group().all_gather(query.contiguous(), dim=1)


def join_ranks(mine: Part, group: GroupCoordinator | None = None) -> Part:
    """Join what the ranks found for the heads of all of them; returns this rank's heads, in float32."""
    group = group or get_dcp_group()
    out, lse = mine
    logs = group.all_gather(lse.contiguous(), dim=0).view(group.world_size, *lse.shape)
    total = logs.logsumexp(0)
    whole = group.reduce_scatter(out * _weight(lse, total), dim=1)
    heads = whole.shape[1]
    first = heads * group.rank_in_group
    return whole, total[:, first : first + heads]


def exchange_ranks(mine: Part, group: GroupCoordinator | None = None) -> Part:
    """As join_ranks, in one exchange: to each rank goes what was found for its heads, in the model's dtype."""
    group = group or get_dcp_group()
    out, lse = mine
    dim, ranks = out.shape[-1], group.world_size
    rows = torch.cat([out, lse.unsqueeze(-1).view(out.dtype)], dim=-1)
    sent = rows.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group.device_group)
    logs = got[..., dim:].contiguous().view(lse.dtype).squeeze(-1)
    total = logs.logsumexp(0)
    return (got[..., :dim] * _weight(logs, total)).sum(0), total


def joining(vllm_config: VllmConfig) -> Callable[[Part], Part]:
    """Return how ranks join what they found: by ``--dcp-comm-backend``."""
    return exchange_ranks if vllm_config.parallel_config.dcp_comm_backend == "a2a" else join_ranks


def join(one: Part, other: Part) -> torch.Tensor:
    """Join two parts of one attention: float32 [tokens, heads, dim]."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * _weight(one[1], total) + other[0] * _weight(other[1], total)


def _weight(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return a part's share of the sum, 0 of an empty one: float32 [tokens, heads, 1]."""
    return (lse - total).exp().nan_to_num(0.0).unsqueeze(-1)
