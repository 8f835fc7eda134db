"""The plain-torch attention against a scalar definition in float64, and the cache write against a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_platform.attention import reference


def attend_one_by_one(query, keys, values, scale, causal, left, right, cap, slopes, sinks):
    """Attention of query [tokens, heads, dim] over keys [length, kv heads, dim], one score at a time, in float64."""
    tokens, heads, dim = query.shape
    length, kv_heads, _ = keys.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for token in range(tokens):
        position = length - tokens + token
        for head in range(heads):
            scores, rows = [], []
            for other in range(length):
                if causal and other > position:
                    continue
                if (left >= 0 and other < position - left) or (right >= 0 and other > position + right):
                    continue
                score = float(query[token, head].double() @ keys[other, head * kv_heads // heads].double()) * scale
                if cap > 0:
                    score = cap * math.tanh(score / cap)
                if slopes is not None:
                    score += float(slopes[head]) * (other - position)
                scores.append(score)
                rows.append(values[other, head * kv_heads // heads].double())
            extra = [] if sinks is None else [float(sinks[head])]
            weights = torch.tensor(scores + extra, dtype=torch.float64).softmax(0)[: len(scores)]
            out[token, head] = sum(weight * row for weight, row in zip(weights, rows, strict=True))
    return out


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4))
    return {
        "requests": [(new, old + new) for new, old in lengths],
        "block_size": draw(st.sampled_from([1, 3, 4, 16])),
        "heads": draw(st.sampled_from([(2, 2), (4, 2), (6, 2), (3, 1)])),
        "left": draw(st.sampled_from([-1, 0, 2, 5])),
        "causal": draw(st.booleans()),
        "cap": draw(st.sampled_from([0.0, 2.0])),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None)
@given(batches())
def test_paged_attention_equals_the_definition(batch: dict) -> None:
    torch.manual_seed(batch["seed"])
    heads, kv_heads = batch["heads"]
    dim, block = 8, batch["block_size"]
    right = -1 if batch["causal"] else batch["left"]
    starts, tables, queries, histories = [0], [], [], []
    width = max(-(-length // block) for _, length in batch["requests"])
    blocks = torch.randperm(width * len(batch["requests"]) + 2)
    key_cache = torch.randn(len(blocks), kv_heads, block, 2 * dim)
    for new, length in batch["requests"]:
        table, blocks = blocks[:width], blocks[width:]
        keys, values = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
        slots = table[torch.arange(length) // block] * block + torch.arange(length) % block
        reference.write_cache(keys, values, key_cache[..., :dim], key_cache[..., dim:], slots)
        tables.append(table)
        histories.append((keys, values))
        queries.append(torch.randn(new, heads, dim))
        starts.append(starts[-1] + new)
    query = torch.cat(queries)
    slopes = torch.rand(heads) if batch["alibi"] else None
    sinks = torch.randn(heads) if batch["sinks"] else None
    output = torch.full_like(query, float("nan"))
    reference.paged_attention(
        output,
        query,
        key_cache[..., :dim],
        key_cache[..., dim:],
        torch.stack(tables).int(),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for _, length in batch["requests"]], dtype=torch.int32),
        0.4,
        batch["causal"],
        batch["left"],
        right,
        batch["cap"],
        slopes,
        sinks,
    )
    for index, (keys, values) in enumerate(histories):
        rows = slice(starts[index], starts[index + 1])
        expected = attend_one_by_one(
            query[rows], keys, values, 0.4, batch["causal"], batch["left"], right, batch["cap"], slopes, sinks
        )
        torch.testing.assert_close(output[rows].double(), expected, rtol=1e-4, atol=1e-5)


def test_padding_requests_are_left_alone() -> None:
    output = torch.full((3, 2, 8), 7.0)
    cache = torch.randn(4, 2, 4, 16)
    reference.paged_attention(
        output,
        torch.randn(3, 2, 8),
        cache[..., :8],
        cache[..., 8:],
        torch.zeros(3, 2, dtype=torch.int32),
        torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        torch.tensor([3, 0, 0], dtype=torch.int32),
        1.0,
        True,
        -1,
        -1,
        0.0,
        None,
        None,
    )
    assert (output[1:] == 7.0).all()
    assert not (output[0] == 7.0).any()


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attention_equals_the_definition(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    output = torch.zeros_like(query)
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    reference.varlen_attention(output, query, key, value, starts, 0.3, causal, 2, 2, 0.0, None, None)
    for start, end in ((0, 4), (4, 9)):
        rows = slice(start, end)
        expected = attend_one_by_one(query[rows], key[rows], value[rows], 0.3, causal, 2, 2, 0.0, None, None)
        torch.testing.assert_close(output[rows].double(), expected, rtol=1e-4, atol=1e-5)


def test_cache_write_skips_padding_and_touches_nothing_else() -> None:
    cache = torch.zeros(3, 2, 4, 16)
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    reference.write_cache(key, value, cache[..., :8], cache[..., 8:], torch.tensor([5, -1, 0, 11]))
    assert torch.equal(cache[1, :, 1, :8], key[0])
    assert torch.equal(cache[0, :, 0, 8:], value[2])
    assert torch.equal(cache[2, :, 3, :8], key[3])
    assert cache.count_nonzero() == 3 * 2 * 16
