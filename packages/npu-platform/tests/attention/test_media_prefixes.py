"""Images whose tokens see each other: which of a step they are, and their attention against the mask of its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_platform.attention import reference
from npu_platform.attention.media_prefixes import media_prefixes

HEADS, DIM, BLOCK = 2, 8, 4


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests with their length, how much of it is computed before this step, and images that do not overlap."""
    found = []
    for length in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)):
        cuts = sorted(draw(st.sets(st.integers(0, length - 1), max_size=4)))
        images = [(first, last) for first, last in zip(cuts[::2], cuts[1::2], strict=False)]
        found.append({"length": length, "computed": draw(st.integers(0, length - 1)), "images": images})
    return found


@settings(max_examples=60, deadline=None)
@given(requests(), st.sampled_from([None, 1, 3, 30]), st.integers(0, 100))
def test_a_second_pass_gives_the_mask_of_the_definition(
    asked: list[dict[str, Any]], window: int | None, seed: int
) -> None:
    if window is not None:  # vLLM leaves longer images out
        for one in asked:
            one["images"] = [(a, b) for a, b in one["images"] if b - a + 1 <= window]
    torch.manual_seed(seed)
    keys, values = (torch.randn(len(asked), HEADS, 20, DIM) for _ in range(2))
    caches = [cache.unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1).contiguous() for cache in (keys, values)]
    table = torch.arange(len(asked) * 5, dtype=torch.int32).view(len(asked), 5)
    new = torch.tensor([one["length"] - one["computed"] for one in asked])
    query = torch.randn(int(new.sum()), HEADS, DIM)
    common = step(asked, new, table)
    left = -1 if window is None else window - 1
    rest: tuple[Any, ...] = (0.3, True, left, -1, 0.0, None, None)
    out = torch.empty_like(query)
    reference.paged_attention(out, query, *caches, table, common.query_start_loc, common.seq_lens, *rest)
    images = media_prefixes(common)
    if images is not None:
        seen = torch.empty_like(query[images.rows])
        where = (images.block_table, images.query_start_loc, images.seq_lens, 0.3, False, left, -1, 0.0, None, None)
        reference.paged_attention(seen, query[images.rows], *caches, *where)
        out.index_copy_(0, images.rows, seen)
    row = 0
    for number, one in enumerate(asked):
        for position in range(one["computed"], one["length"]):
            mask = visible(position, one, window)
            scores = torch.einsum("hd,hkd->hk", query[row], keys[number, :, : one["length"]]) * 0.3
            expected = scores.masked_fill(~mask, -torch.inf).softmax(-1)[:, None] @ values[number, :, : one["length"]]
            torch.testing.assert_close(out[row], expected[:, 0])
            row += 1


def test_steps_without_images_have_none() -> None:
    table = torch.zeros(1, 5, dtype=torch.int32)
    for images in ([], [(2, 4)], [(9, 9)]):  # none, one of an earlier step, one of a single token
        asked = [{"length": 12, "computed": 8, "images": images}]
        assert media_prefixes(step(asked, torch.tensor([4]), table)) is None


def step(asked: list[dict[str, Any]], new: torch.Tensor, table: torch.Tensor) -> Any:
    """What vLLM's runner says of a step."""
    lengths = torch.tensor([one["length"] for one in asked], dtype=torch.int32)
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    return SimpleNamespace(
        mm_req_doc_ranges={number: one["images"] for number, one in enumerate(asked)},
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=table,
    )


def visible(position: int, one: dict[str, Any], window: int | None) -> torch.Tensor:
    """Which tokens that of a position sees: (causal and window) or those of its image."""
    other = torch.arange(one["length"])
    seen = other <= position
    if window is not None:
        seen &= other > position - window
    for first, last in one["images"]:
        if first <= position <= last:
            seen |= (other >= first) & (other <= last)
    return seen
