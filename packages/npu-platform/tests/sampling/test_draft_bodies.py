"""The torch bodies of the drafting kernels against the Triton kernels' own loops, written out in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_platform.sampling import draft_bodies

PAD = -1
requests = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.sampled_from([1, 3, 16]), st.integers(0, 3))
def test_a_step_moves_every_request_on(positions: list[int], block_size: int, padding: int) -> None:
    limit, batch = 29, len(positions)
    blocks = -(-limit // block_size)
    table = torch.randint(0, 100, (batch, blocks), dtype=torch.int32)
    place = torch.tensor(positions)
    seq_lens, slots = torch.tensor(positions, dtype=torch.int32) + 1, torch.full((batch + padding,), 99)
    draft_bodies.step_slot_mapping(
        place, table, table.stride(0), seq_lens, place, slots, block_size, limit, blocks, PAD, batch
    )
    moved = [position + 1 if position + 1 < limit else 0 for position in positions]
    assert place.tolist() == moved
    expected = [
        int(table[row, now // block_size]) * block_size + now % block_size if now else PAD
        for row, now in enumerate(moved)
    ]
    assert slots.tolist() == expected + [PAD] * padding
    assert seq_lens.tolist() == [
        min(before + 2, limit) if now else 1 for before, now in zip(positions, moved, strict=True)
    ]


@settings(max_examples=50, deadline=None)
@given(requests)
def test_tokens_to_sample(batch: list[tuple[int, int]]) -> None:
    """A request of so many tokens has drafts for all but one of them, of which so many were accepted."""
    lengths, drafts = [length for length, _ in batch], [length - 1 for length, _ in batch]
    valid = [min(accepted, draft) + 1 for draft, (_, accepted) in zip(drafts, batch, strict=True)]
    indices, rejected = (torch.full((len(batch),), 99, dtype=torch.int32) for _ in range(2))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    draft_bodies.tokens_to_sample(
        torch.tensor(drafts).cumsum(0).int(), torch.tensor(valid).int(), starts, indices, rejected, len(batch)
    )
    expected = [draft + 1 - count if draft else 0 for draft, count in zip(drafts, valid, strict=True)]
    assert rejected.tolist() == expected
    assert indices.tolist() == [int(end) - 1 - more for end, more in zip(starts[1:].tolist(), expected, strict=True)]


def test_next_tokens() -> None:
    """All accepted; some; a number outside of the vocabulary; none; and a request that is still in its prompt."""
    sampled = torch.tensor([[1, 2, 3], [4, 5, -1], [6, 100, -1], [-1, -1, -1], [7, 8, 9]], dtype=torch.int32)
    discarded = torch.tensor([False, False, False, False, True, True])
    backup = torch.tensor([10, 11, 12, 13, 14, 15], dtype=torch.int32)
    tokens, counts = (torch.full((5,), 99, dtype=torch.int32) for _ in range(2))
    draft_bodies.next_tokens(sampled, discarded, backup, tokens, counts, 100, 3, 5, 3, 4)
    assert tokens.tolist() == [3, 5, 6, 13, 14]
    assert counts.tolist() == [3, 2, 1, 0, 0]


@dataclass
class Expanded:
    """The outputs of expand_inputs, filled with what it must leave alone."""

    tokens: torch.Tensor
    positions: torch.Tensor
    is_rejected: torch.Tensor
    is_masked: torch.Tensor
    new_indices: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, batch: int, slots: int) -> Expanded:
        room = tokens + batch * slots + 2
        kinds: list[Any] = [torch.int32, torch.int64, torch.bool, torch.bool]
        wide = [torch.full((room,), 1, dtype=kind) for kind in kinds]
        return cls(*wide, *(torch.full((size,), 99, dtype=torch.int32) for size in (batch * slots, tokens)))


@settings(max_examples=80, deadline=None)
@given(requests, st.integers(1, 3), st.booleans(), st.integers(0, 2**31))
def test_expand_inputs(batch: list[tuple[int, int]], slots: int, shift: bool, seed: int) -> None:
    torch.manual_seed(seed)
    lengths = [length for length, _ in batch]
    rejected = [min(count, length - 1) for length, count in batch]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens, firsts = torch.randint(100, 200, (sum(lengths),), dtype=torch.int32), torch.randint(0, 50, (len(batch),))
    positions = torch.cat([first + torch.arange(length) for first, length in zip(firsts, lengths, strict=True)])
    following = torch.randint(200, 300, (len(batch),), dtype=torch.int32)
    ends = starts[1:] - 1 - torch.tensor(rejected).int()
    made = Expanded.empty(len(tokens), len(batch), slots)
    draft_bodies.expand_inputs(
        tokens, positions, following, *vars(made).values(), starts, ends, 0, 7, len(tokens), slots, shift, 16
    )
    rows, new, hidden = [], [], []
    for row, (length, lost) in enumerate(zip(lengths, rejected, strict=True)):
        begin = int(starts[row])
        kept = tokens[begin + shift : begin + length - lost].tolist()
        hidden += range(len(rows), len(rows) + length)
        new += range(len(rows) + len(kept), len(rows) + len(kept) + slots)
        line = [(token, False, False) for token in [*kept, int(following[row])]]
        line += [(7, False, True)] * (slots - 1) + [(0, True, False)] * lost
        rows += [
            (token, 0 if gone else int(firsts[row]) + step, gone, masked)
            for step, (token, gone, masked) in enumerate(line)
        ]
    for output, expected in zip(list(vars(made).values())[:4], zip(*rows, strict=True), strict=True):
        assert output.tolist()[: len(rows)] == list(expected)
        assert all(output[len(rows) :] == 1)
    assert made.new_indices.tolist() == new
    assert made.hidden.tolist() == (hidden if shift else [99] * len(tokens))


@pytest.mark.parametrize("method", ["eagle_step_slot_mapping_metadata", "eagle_prepare_inputs_padded"])
def test_vllm_launches_what_is_registered(method: str) -> None:
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.spec_decode import utils

    from npu_platform import compat
    from npu_platform.sampling.triton_bodies import TRITON_BODIES

    compat.register_kernels(TRITON_BODIES)
    assert isinstance(getattr(utils, f"_{method}").kernel, KernelOverride)
