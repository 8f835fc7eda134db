"""Norm of heads, rotation and cache write in one op: bit for bit the three ops."""

from __future__ import annotations

import pytest
import torch

EPS = 1e-6


def inputs(dtype, device, heads=4, kv_heads=2, size=64, tokens=5, rotary_dim=None):
    """Views of one projection, a cache with keys and values side by side, and slots that skip a token."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(device, dtype)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
    cache = torch.zeros(3, kv_heads, 16, 2 * size, dtype=dtype, device=device)
    slots = torch.tensor([40, -1, 3, 17, 0, 9, 33][: tokens - 1], dtype=torch.int64, device=device)
    table = torch.randn(50, rotary_dim or size).to(device, dtype)
    positions = torch.randint(0, 50, (tokens,)).to(device)
    return qkv, query, key, value, cache, slots, table, positions


def three_ops(ops, inputs, weights, neox):
    _, query, key, value, cache, slots, table, positions = inputs
    size = query.shape[-1]
    for heads, weight in zip((query, key), weights, strict=True):
        if weight is not None:
            heads.copy_(ops.rms_norm(heads.contiguous(), weight, EPS))
    ops.rotary_embedding(positions, query, key, size, table, neox)
    ops.reshape_and_cache(key, value, cache[..., :size], cache[..., size:], slots)


def one_op(ops, inputs, weights, neox):
    _, query, key, value, cache, slots, table, positions = inputs
    caches = cache[..., : query.shape[-1]], cache[..., query.shape[-1] :]
    ops.qk_norm_rotary_and_cache(positions, query, key, value, *weights, EPS, table, neox, *caches, slots)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("size", "rotary_dim"), [(64, 64), (80, 48), (20, 12)])
@pytest.mark.parametrize("normed", ["both", "key", "none"])
def test_one_op_is_three(ops, isa, device, dtype, neox, size, rotary_dim, normed):
    torch.manual_seed(1)
    one = inputs(dtype, device, size=size, rotary_dim=rotary_dim)
    torch.manual_seed(1)
    three = inputs(dtype, device, size=size, rotary_dim=rotary_dim)
    weights = [torch.randn(size).to(device, dtype) if normed in ("both", name) else None for name in ("query", "key")]
    one_op(ops, one, weights, neox)
    three_ops(ops, three, weights, neox)
    for a, b in zip(one, three, strict=True):
        assert torch.equal(a, b)
    assert one[4].any()


def test_float32_weights_and_angles(ops, isa):
    """As models with float32 tables have them."""
    given = inputs(torch.bfloat16, "cpu", tokens=7)
    three = [t.clone() for t in given]
    size, parts = 64, three[0].split([256, 128, 128], dim=-1)
    three[1:4] = [part.unflatten(-1, (-1, size)) for part in parts]
    weights = [torch.randn(size), torch.randn(size)]
    one, other = (*given[:6], given[6].float(), given[7]), (*three[:6], three[6].float(), three[7])
    one_op(ops, one, weights, True)
    three_ops(ops, other, weights, True)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[4], other[4])


def test_no_tokens(ops, isa):
    given = inputs(torch.float32, "cpu", tokens=1)
    _, query, key, value, cache, slots, table, positions = given
    empty = (given[0][:0], query[:0], key[:0], value[:0], cache, slots, table, positions[:0])
    one_op(ops, empty, [None, None], True)
    assert not cache.any()


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (1, lambda t: t.flatten(1), "query must be"),
        (3, lambda t: t[:, :1], "same heads"),
        (4, lambda t: t.double(), "dtype"),
        (5, lambda t: torch.zeros(9, dtype=torch.int64), "no more slots"),
        (6, lambda t: t[:, :63], "cos_sin_cache"),
        (1, lambda t: t[:, :1].expand(t.shape), "no dimension may be expanded"),
    ],
)
def test_what_does_not_fit_is_refused(ops, place, change, match):
    given = list(inputs(torch.float32, "cpu"))
    given[place] = change(given[place])
    with pytest.raises(RuntimeError, match=match):
        one_op(ops, given, [None, None], True)
