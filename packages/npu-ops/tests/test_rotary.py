from __future__ import annotations

import pytest
import torch

TOKENS, POSITIONS = 9, 50


def rotated(x, cos, sin, *, neox):
    """x: [T, heads, size]; cos, sin: [T, half], all float64."""
    half = cos.shape[-1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (part[..., :half], part[..., half:]) if neox else (part[..., ::2], part[..., 1::2])
    cos, sin = cos[:, None], sin[:, None]
    first, second = a * cos - b * sin, b * cos + a * sin
    both = torch.cat((first, second), -1) if neox else torch.stack((first, second), -1).flatten(-2)
    return torch.cat((both, rest), -1)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("rotary", "size"), [(128, 128), (64, 64), (20, 80), (96, 96), (32, 256), (6, 8)])
def test_rotates_in_place(ops, isa, device, dtype, close, neox, rotary, size):
    q, k = torch.randn(TOKENS, 4 * size).to(dtype), torch.randn(TOKENS, 2 * size).to(dtype)
    table, where = torch.randn(POSITIONS, rotary).to(dtype), torch.randint(0, POSITIONS, (TOKENS,))
    q2, k2 = q.to(device, copy=True), k.to(device, copy=True)
    ops.rotary_embedding(where.to(device), q2, k2, size, table.to(device), neox)
    cos, sin = table[where].double().chunk(2, -1)
    for before, after in ((q, q2), (k, k2)):
        close(after, rotated(before.double().unflatten(-1, (-1, size)), cos, sin, neox=neox).flatten(1), units=2)


def test_key_is_optional_and_views_are_written(ops, isa, close):
    qkv, table = torch.randn(TOKENS, 6, 64), torch.randn(POSITIONS, 64)
    where, before = torch.randint(0, POSITIONS, (TOKENS,)), qkv.clone()
    ops.rotary_embedding(where, qkv[:, :4], None, 64, table, True)
    cos, sin = table[where].double().chunk(2, -1)
    close(qkv[:, :4], rotated(before[:, :4].double(), cos, sin, neox=True), units=2)
    assert torch.equal(qkv[:, 4:], before[:, 4:])


def test_float_table_serves_narrow_queries(ops, isa, close):
    q, table, where = torch.randn(TOKENS, 64).bfloat16(), torch.randn(POSITIONS, 64), torch.arange(TOKENS)
    before = q.double().unflatten(-1, (-1, 64))
    ops.rotary_embedding(where, q, None, 64, table, True)
    close(q, rotated(before, *table[where].double().chunk(2, -1), neox=True).flatten(1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("neox", [True, False])
def test_multimodal_sections(ops, isa, device, dtype, close, interleaved, neox):
    size, sections = 64, [12, 10, 10]
    q, k = torch.randn(TOKENS, 4 * size).to(dtype), torch.randn(TOKENS, size).to(dtype)
    table, where = torch.randn(POSITIONS, size).to(dtype), torch.randint(0, POSITIONS, (3, TOKENS))
    rows = [0] * sections[0] + [1] * sections[1] + [2] * sections[2]
    if interleaved:
        rows = [i % 3 if i % 3 and i < 3 * sections[i % 3] else 0 for i in range(size // 2)]
    all_cos, all_sin = table[where].double().chunk(2, -1)
    cos = torch.stack([all_cos[r, :, i] for i, r in enumerate(rows)], -1)
    sin = torch.stack([all_sin[r, :, i] for i, r in enumerate(rows)], -1)
    q2, k2 = q.to(device, copy=True), k.to(device, copy=True)
    ops.multimodal_rotary_embedding(where.to(device), q2, k2, size, table.to(device), neox, sections, interleaved)
    for before, after in ((q, q2), (k, k2)):
        close(after, rotated(before.double().unflatten(-1, (-1, size)), cos, sin, neox=neox).flatten(1), units=2)


def test_query_of_another_length_is_refused(ops):
    with pytest.raises(RuntimeError, match="query must be"):
        ops.rotary_embedding(torch.arange(3), torch.randn(4, 64), None, 64, torch.randn(9, 64), True)


@pytest.mark.parametrize("neox", [True, False])
def test_positions_outside_of_the_table_give_nan(ops, isa, device, dtype, neox):
    """A replay cannot raise; what is beside the table is somebody else's."""
    q, table = torch.randn(3, 16).to(device, dtype), torch.randn(POSITIONS, 16).to(device, dtype)
    ops.rotary_embedding(torch.tensor([3, POSITIONS, -1]).to(device), q, None, 16, table, neox)
    assert q.isnan().tolist() == [[False] * 16, [True] * 16, [True] * 16]
    q, where = torch.randn(2, 16).to(device, dtype), torch.tensor([[1, 1], [2, 2], [3, 10**12]])
    ops.multimodal_rotary_embedding(where.to(device), q, None, 16, table, neox, [4, 2, 2], False)
    assert q.isnan().tolist() == [[False] * 16, [True] * 16]


@pytest.mark.parametrize("sections", [[0, 0, 0], [-4, 6, 6], [4, 2, 1], [4, 2, 3], [2**62, 2**62, 8], []])
def test_sections_share_out_the_channels(ops, sections):
    where, q, table = torch.zeros(3, 2, dtype=torch.int64), torch.ones(2, 16), torch.ones(4, 16)
    with pytest.raises(RuntimeError, match="sections must share out the 8 channels"):
        ops.multimodal_rotary_embedding(where, q, None, 16, table, True, sections, False)


def test_heads_without_elements_are_refused(ops):
    with pytest.raises(RuntimeError, match="head_size must be positive"):
        ops.rotary_embedding(torch.arange(2), torch.zeros(2, 16), None, 0, torch.zeros(4, 0), True)
