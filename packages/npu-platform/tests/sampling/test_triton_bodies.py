"""The torch bodies against the Triton kernels' own loops, written out in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_platform.sampling import triton_bodies


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 4),
)
def test_slot_mapping(requests: list[tuple[int, int]], block_size: int, padding: int) -> None:
    starts, positions, expected = [0], [], []
    table = torch.randint(0, 100, (len(requests) + 1, 30), dtype=torch.int32)
    for row, (new, old) in enumerate(requests):
        starts.append(starts[-1] + new)
        for position in range(old, old + new):
            positions.append(position)
            expected.append(int(table[row, position // block_size]) * block_size + position % block_size)
    tokens = len(expected)
    slots = torch.full((tokens + padding + 2,), 99)
    triton_bodies.compute_slot_mapping(
        tokens,
        tokens + padding,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([*positions, 0, 0], dtype=torch.int64),
        table,
        table.stride(0),
        slots,
        block_size,
        1,
        0,
        1,
        -1,
        1024,
    )
    assert slots.tolist() == expected + [-1] * padding + [99, 99]


@pytest.mark.parametrize(("block_size", "ranks", "run"), [(4, 2, 1), (8, 3, 4), (6, 2, 3)])
def test_ranks_of_context_parallelism_share_the_slots_out(block_size: int, ranks: int, run: int) -> None:
    """Each token has a slot of one rank; a rank's tokens lie in their order, without gaps."""
    tokens, starts = 50, torch.tensor([0, 50], dtype=torch.int32)
    positions, table = torch.arange(tokens), torch.arange(1, 40, dtype=torch.int32)[None]
    held = []
    for rank in range(ranks):
        slots = torch.full((tokens,), 99)
        arguments = tokens, tokens, starts, positions, table, table.stride(0), slots, block_size, ranks, rank, run, -1
        triton_bodies.compute_slot_mapping(*arguments, 1024)
        held.append(slots)
        mine = [position for position in range(tokens) if position // run % ranks == rank]
        assert (slots >= 0).nonzero().flatten().tolist() == mine
        assert slots[mine].tolist() == list(range(block_size, block_size + len(mine)))
    assert ((torch.stack(held) >= 0).sum(0) == 1).all()


def test_expand_repeats_and_replaces() -> None:
    output = torch.zeros(6)
    triton_bodies.expand(output, torch.tensor([0.5, 0.0, 0.9]), torch.tensor([2, 5, 6]), 0, 1, 128)
    assert output.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0, 0.9])


def reject_one_by_one(counts, accepted, if_accepted, if_rejected, bonus, chosen, width):
    """The kernels' loop: tokens up to and with the first rejection, the bonus token when there is none."""
    rows, start = [], 0
    for row, count in enumerate(counts):
        line = [-1] * width
        if chosen[row]:
            rejected = False
            for step in range(count):
                if not rejected:
                    token = start + step
                    line[step] = (if_accepted if accepted[token] else if_rejected)[token]
                    rejected = not accepted[token]
            if not rejected:
                line[count] = bonus[row]
        rows.append(line)
        start += count
    return rows


speculation = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(speculation, st.integers(0, 2**31))
def test_greedy_rejection(requests: list[tuple[int, bool]], seed: int) -> None:
    torch.manual_seed(seed)
    counts, greedy = [count for count, _ in requests], [flag for _, flag in requests]
    tokens, batch = sum(counts), len(counts)
    draft, argmax = torch.randint(0, 2, (tokens,), dtype=torch.int32), torch.randint(0, 2, (tokens,))
    bonus = torch.randint(10, 20, (batch, 1))
    output = torch.full((batch, 5), -1, dtype=torch.int32)
    cumulative = torch.tensor(counts).cumsum(0).int()
    triton_bodies.rejection_greedy_sample(
        output, cumulative, draft, argmax, bonus, torch.tensor(greedy), 4, None, None, False
    )
    expected = reject_one_by_one(
        counts, (draft == argmax).tolist(), argmax.tolist(), argmax.tolist(), bonus.flatten().tolist(), greedy, 5
    )
    assert output.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(speculation, st.booleans(), st.integers(0, 2**31))
def test_random_rejection(requests: list[tuple[int, bool]], with_draft_probs: bool, seed: int) -> None:
    torch.manual_seed(seed)
    counts, greedy = [count for count, _ in requests], [flag for _, flag in requests]
    tokens, batch, vocabulary = sum(counts), len(counts), 4
    draft = torch.randint(-1, vocabulary, (tokens,), dtype=torch.int32)
    target = torch.rand(tokens, vocabulary).softmax(-1)
    proposal = torch.rand(tokens, vocabulary).softmax(-1) if with_draft_probs else None
    uniform, recovered = torch.rand(tokens, dtype=torch.float64), torch.randint(0, 9, (tokens,), dtype=torch.int32)
    bonus = torch.randint(10, 20, (batch, 1))
    output = torch.full((batch, 5), -1, dtype=torch.int32)
    cumulative = torch.tensor(counts).cumsum(0).int()
    triton_bodies.rejection_random_sample(
        output,
        cumulative,
        draft,
        proposal,
        target,
        bonus,
        recovered,
        uniform,
        torch.tensor(greedy),
        4,
        vocabulary,
        None,
        not with_draft_probs,
        False,
    )
    accepted = []
    for token in range(tokens):
        q = 1.0 if proposal is None else float(proposal[token, max(int(draft[token]), 0)])
        p = float(target[token, max(int(draft[token]), 0)])
        accepted.append(int(draft[token]) >= 0 and q > 0 and p / q >= float(uniform[token]))
    expected = reject_one_by_one(
        counts, accepted, draft.tolist(), recovered.tolist(), bonus.flatten().tolist(), [not flag for flag in greedy], 5
    )
    assert output.tolist() == expected


def test_recovered_tokens_follow_the_residual_distribution() -> None:
    torch.manual_seed(0)
    draws, vocabulary = 20000, 5
    target = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1])
    proposal = torch.tensor([0.5, 0.1, 0.2, 0.1, 0.1])
    residual = (target - proposal).clamp_min(0)
    output = torch.empty(draws, dtype=torch.int32)
    triton_bodies.sample_recovered_tokens(
        output,
        torch.arange(1, draws + 1, dtype=torch.int32),
        torch.zeros(draws, dtype=torch.int32),
        proposal.expand(draws, -1),
        target.expand(draws, -1),
        torch.empty(draws, vocabulary).exponential_().reciprocal(),
        vocabulary,
        1024,
        False,
        False,
    )
    counted = torch.bincount(output.long(), minlength=vocabulary) / draws
    torch.testing.assert_close(counted, residual / residual.sum(), atol=0.02, rtol=0)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovered_tokens_take_columns(dtype: torch.dtype, certain: bool, tokens: int) -> None:
    """The kernel reads flat memory, so that draft and output may be [tokens, 1], as in vLLM's own tests."""
    torch.manual_seed(tokens)
    vocabulary = 7
    draft = torch.randint(0, vocabulary, (tokens, 1), dtype=torch.int32)
    target = torch.rand(tokens, vocabulary).softmax(-1)
    proposal = None if certain else torch.rand(tokens, vocabulary).softmax(-1)
    noise = torch.rand(1, vocabulary, dtype=dtype)
    output = torch.full((tokens, 1), -1, dtype=torch.int32)
    triton_bodies.sample_recovered_tokens(
        output,
        torch.tensor([tokens], dtype=torch.int32),
        draft,
        proposal,
        target,
        noise,
        vocabulary,
        1024,
        certain,
        dtype == torch.float64,
    )
    for row, token in enumerate(draft.flatten().tolist()):
        rest = target[row].clone() if proposal is None else (target[row] - proposal[row]).clamp_min(0)
        if proposal is None:
            rest[token] = 0
        assert output[row].item() == int((rest * noise[0]).argmax())


@settings(max_examples=60, deadline=None)
@given(speculation, st.booleans(), st.integers(0, 2**31))
def test_synthetic_acceptance(requests: list[tuple[int, bool]], greedy: bool, seed: int) -> None:
    """A draft is accepted where its number is below the rate of its place, whatever the target says of it."""
    torch.manual_seed(seed)
    counts, batch = [count for count, _ in requests], len(requests)
    tokens = sum(counts)
    draft, other = torch.randint(-1, 4, (tokens,), dtype=torch.int32), torch.randint(5, 9, (tokens,))
    bonus, rates = torch.randint(10, 20, (batch, 1)), torch.rand(4)
    uniform, cumulative = torch.rand(tokens, dtype=torch.float64), torch.tensor(counts).cumsum(0).int()
    output, chosen = torch.full((batch, 5), -1, dtype=torch.int32), torch.full((batch,), greedy)
    if greedy:
        triton_bodies.rejection_greedy_sample(output, cumulative, draft, other, bonus, chosen, 4, uniform, rates, True)
    else:
        target = torch.rand(tokens, 9)
        triton_bodies.rejection_random_sample(
            output, cumulative, draft, None, target, bonus, other.int(), uniform, chosen, 4, 9, rates, True, True
        )
    places = [place for count in counts for place in range(count)]
    accepted = [
        int(draft[token]) >= 0 and float(uniform[token]) < float(rates[place]) for token, place in enumerate(places)
    ]
    flat = bonus.flatten().tolist()
    expected = reject_one_by_one(counts, accepted, draft.tolist(), other.tolist(), flat, [True] * batch, 5)
    assert output.tolist() == expected


def test_every_body_names_a_kernel_that_vllm_has() -> None:
    import importlib

    for name in triton_bodies.TRITON_BODIES:
        parts = name.split(".")
        at = next(i for i, part in enumerate(parts) if not part.islower() or part.endswith("_kernel"))
        target = importlib.import_module(".".join(parts[:at]))
        for part in parts[at:]:
            target = getattr(target, part)
        assert target is not None
