"""Parts of one attention, joined over ranks and with a step's own tokens, are the attention of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_platform.attention import context_parallel, reference

HEADS, DIM, RANKS, SCALE = 4, 16, 2, 0.25


class Ranks:
    """A group of ranks that run one after the other; when each has run twice, all have got what all gave."""

    def __init__(self, logs: list[torch.Tensor]) -> None:
        self.logs, self.world_size, self.rank_in_group = logs, len(logs), 0
        self.given: dict[int, torch.Tensor] = {}
        self.device_group = object()

    def all_gather(self, mine: torch.Tensor, dim: int) -> torch.Tensor:
        assert mine.equal(self.logs[self.rank_in_group])
        return torch.cat(self.logs, dim=dim)

    def all_to_all(self, got: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        assert group is self.device_group
        self.given[self.rank_in_group] = sent
        got.copy_(torch.stack([rows[self.rank_in_group] for rows in self.given.values()]))

    def reduce_scatter(self, mine: torch.Tensor, dim: int) -> torch.Tensor:
        self.given[self.rank_in_group] = mine
        return torch.stack([*self.given.values()]).sum(0).chunk(self.world_size, dim)[self.rank_in_group]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool) -> context_parallel.Part:
    """Attend by the reference, to keys and values [length, 1, dim]."""
    out, lse = torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf)
    caches = (each.transpose(0, 1)[None] for each in (keys, values))
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, len(query)], dtype=torch.int32)
    length = torch.tensor([len(keys)], dtype=torch.int32)
    reference.paged_attention(out, query, *caches, table, starts, length, SCALE, causal, -1, -1, 0.0, None, None, lse)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
@pytest.mark.parametrize("context", [0, 1, 7, 40])
@pytest.mark.parametrize("new", [1, 5])
def test_ranks_find_together_what_one_finds(
    context: int, new: int, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, keys, values = torch.randn(new, HEADS, DIM), *torch.randn(2, context + new, 1, DIM)
    expected, _ = attend(query, keys, values, causal=True)
    shards = [attend(query, keys[:context][r::RANKS], values[:context][r::RANKS], causal=False) for r in range(RANKS)]
    shards = [(out.to(dtype), lse) for out, lse in shards]
    group: Any = Ranks([lse for _, lse in shards])
    monkeypatch.setattr(context_parallel, "dist", SimpleNamespace(all_to_all_single=group.all_to_all))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(dcp_comm_backend=backend))
    join_ranks: Any = context_parallel.joining(config)
    found = {}
    for group.rank_in_group in [*range(RANKS)] * 2:
        rank = group.rank_in_group
        own = attend(query.chunk(RANKS, 1)[rank], keys[context:], values[context:], causal=True)
        found[rank] = context_parallel.join(join_ranks(shards[rank], group), own)
    precise = 1e-5 if dtype == torch.float32 else 1e-2
    together = torch.cat([found[rank] for rank in range(RANKS)], 1)
    torch.testing.assert_close(together, expected, atol=precise, rtol=precise)


def test_lengths_are_of_tokens_before_the_step_and_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, scheduler = SimpleNamespace(cp_kv_cache_interleave_size=2), SimpleNamespace(max_num_seqs=4)
    config: Any = SimpleNamespace(parallel_config=parallel, scheduler_config=scheduler)
    lengths = context_parallel.ContextLengths(config, torch.device("cpu"))
    common: Any = SimpleNamespace(
        seq_lens=torch.tensor([9, 3, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 4, 4], dtype=torch.int32),
        num_reqs=3,
    )
    held = []
    for rank in range(RANKS):
        group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
        monkeypatch.setattr(context_parallel, "get_dcp_group", lambda group=group: group)
        held.append(lengths.of(common).tolist())
        assert lengths.of(common).data_ptr() == lengths.of(common).data_ptr()
    assert held == [[4, 0, 0], [4, 0, 0]]  # of 8 tokens in runs of two: 0, 1, 4, 5 and 2, 3, 6, 7


def test_each_token_sees_what_a_rank_holds_of_those_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory for each step that may be recorded, with padding behind it; larger steps in their own."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=2),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=6),
    )
    alone = context_parallel.TokensAlone(config, torch.device("cpu"))
    table = torch.tensor([[7, 8], [5, 6], [0, 0]], dtype=torch.int32)
    starts, lengths = torch.tensor([[0, 1, 4, 4], [9, 4, 0, 0]], dtype=torch.int32)
    where = table, starts, lengths[:3]
    for rank, held in enumerate([[5, 2, 2, 2], [4, 0, 1, 2]]):  # runs of two: 0, 1, 4, 5, 8 and 2, 3, 6, 7
        group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
        monkeypatch.setattr(context_parallel, "get_dcp_group", lambda group=group: group)
        rows, first, seen = alone.of(where, 6)
        assert (first.tolist(), seen.tolist()) == ([*range(7)], [*held, 0, 0])
        assert rows[:4].tolist() == [[7, 8], *[[5, 6]] * 3]
        assert [each.data_ptr() for each in alone.of(where, 6)] == [each.data_ptr() for each in (rows, first, seen)]
        larger = alone.of(where, 8)
        assert larger[2].tolist() == [*held, 0, 0, 0, 0]
        assert larger[0].data_ptr() != rows.data_ptr()
