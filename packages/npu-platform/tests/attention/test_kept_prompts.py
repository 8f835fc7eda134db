"""R-SWA: which tokens of a step see two runs of keys, and their attention against the mask of its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_platform.attention import context_parallel, reference
from npu_platform.attention.kept_prompts import KeptPrompts

HEADS, DIM, BLOCK, BLOCKS = 2, 8, 4, 6


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, int]]:
    """Requests with their length, how much of it is computed before this step, and the length of their prompt."""
    found = []
    for length in draw(st.lists(st.integers(1, BLOCK * BLOCKS), min_size=1, max_size=4)):
        computed = draw(st.one_of(st.integers(0, length - 1), st.just(length - 1)))
        found.append({"length": length, "computed": computed, "prompt": draw(st.integers(1, length))})
    return found


@settings(max_examples=80, deadline=None)
@given(requests(), st.sampled_from([1, 3, 30]), st.integers(0, 2), st.sampled_from([0, 2, 64]), st.integers(0, 100))
def test_two_passes_give_the_mask_of_the_definition(
    asked: list[dict[str, int]], window: int, drafts: int, recorded: int, seed: int
) -> None:
    torch.manual_seed(seed)
    keys, values = (torch.randn(len(asked), HEADS, BLOCK * BLOCKS, DIM) for _ in range(2))
    caches = [cache.unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1).contiguous() for cache in (keys, values)]
    common = step(asked)
    query = torch.randn(common.num_actual_tokens, HEADS, DIM)
    out = torch.empty_like(query)
    where = common.block_table_tensor, common.query_start_loc, common.seq_lens
    reference.paged_attention(out, query, *caches, *where, 0.3, True, -1, -1, 0.0, None, None)
    runs = KeptPrompts(settings_of(drafts, recorded), torch.device("cpu"), window).of(common)
    if runs is not None:
        seeing = query if runs.rows is None else query[runs.rows]
        parts = []
        for lengths, causal, left in ((runs.first, False, -1), (runs.second, True, runs.window - 1)):
            part = torch.zeros_like(seeing), torch.full(seeing.shape[:2], -torch.inf)
            place = runs.block_table, runs.query_start_loc, lengths
            reference.paged_attention(part[0], seeing, *caches, *place, 0.3, causal, left, -1, 0.0, None, None, part[1])
            parts.append(part)
        rows = torch.arange(len(query)) if runs.rows is None else runs.rows
        out.index_copy_(0, rows, context_parallel.join(*parts))
    row = 0
    for number, one in enumerate(asked):
        for position in range(one["computed"], one["length"]):
            key = torch.arange(one["length"])
            seen = (key <= position) & ((key < one["prompt"]) | (position - key < window))
            scores = torch.einsum("hd,hkd->hk", query[row], keys[number, :, : one["length"]]) * 0.3
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)[:, None]
            torch.testing.assert_close(out[row], (weights @ values[number, :, : one["length"]])[:, 0])
            row += 1


def test_steps_of_decodes_get_the_same_memory() -> None:
    kept = KeptPrompts(settings_of(drafts=0, recorded=4), torch.device("cpu"), 2)
    before = kept.of(step([{"length": 9, "computed": 8, "prompt": 3}] * 3))
    after = kept.of(step([{"length": 10, "computed": 9, "prompt": 9}] * 3))
    assert before is not None
    assert after is not None
    for name in ("query_start_loc", "block_table", "first", "second"):
        assert getattr(before, name).data_ptr() == getattr(after, name).data_ptr()
    assert (after.first.tolist(), after.second.tolist()) == ([10] * 3, [0] * 3)


def test_padding_and_a_capture_without_requests_see_nothing_and_all() -> None:
    kept = KeptPrompts(settings_of(drafts=0, recorded=4), torch.device("cpu"), 2)
    common = step([{"length": 5, "computed": 4, "prompt": 1}] * 2)
    common.query_start_loc, common.seq_lens = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([5, 0])
    padded = kept.of(common)
    assert padded is not None
    assert (padded.first.tolist(), padded.second.tolist()) == ([1, 0], [5, 0])
    common.rswa_prefix_lens = None
    captured = kept.of(common)
    assert captured is not None
    assert captured.second.tolist() == [5, 0]


def test_prompts_alone_are_causal_as_usual() -> None:
    kept = KeptPrompts(settings_of(drafts=0, recorded=4), torch.device("cpu"), 2)
    assert kept.of(step([{"length": 9, "computed": 0, "prompt": 9}])) is None


def settings_of(drafts: int, recorded: int) -> Any:
    """What the builder reads of vLLM's configuration."""
    sizes = SimpleNamespace(max_cudagraph_capture_size=recorded)
    return SimpleNamespace(num_speculative_tokens=drafts, compilation_config=sizes)


def step(asked: list[dict[str, int]]) -> Any:
    """What vLLM's runner says of a step."""
    new = torch.tensor([one["length"] - one["computed"] for one in asked])
    lengths = torch.tensor([one["length"] for one in asked], dtype=torch.int32)
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(asked),
        num_actual_tokens=int(new.sum()),
        max_query_len=int(new.max()),
        block_table_tensor=torch.arange(len(asked) * BLOCKS, dtype=torch.int32).view(len(asked), BLOCKS),
        rswa_prefix_lens=torch.tensor([one["prompt"] for one in asked], dtype=torch.int32),
    )
