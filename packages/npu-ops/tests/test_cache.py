from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def caches(blocks, heads, block_size, size, value_size, dtype=torch.float32, device="cpu"):
    kv = torch.zeros(blocks, heads, block_size, size + value_size, dtype=dtype, device=device)
    return kv[..., :size], kv[..., size:]


@pytest.mark.parametrize(("block_size", "size", "value_size"), [(16, 64, 64), (7, 40, 24), (1, 8, 8), (128, 128, 128)])
def test_writes_each_slot(ops, isa, device, dtype, block_size, size, value_size):
    key, value = torch.randn(20, 3, size).to(dtype), torch.randn(20, 3, value_size).to(dtype)
    k_cache, v_cache = caches(25, 3, block_size, size, value_size, dtype, device)
    slots = torch.randperm(25 * block_size)[:20]
    slots[4] = -1
    ops.reshape_and_cache(key.to(device), value.to(device), k_cache, v_cache, slots.to(device))
    written = torch.zeros(25, block_size, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            b, o = divmod(slot, block_size)
            written[b, o] = True
            assert torch.equal(k_cache[b, :, o].cpu(), key[t])
            assert torch.equal(v_cache[b, :, o].cpu(), value[t])
    assert not k_cache.cpu().transpose(1, 2)[~written].any()


def test_only_as_many_keys_as_slots(ops, isa):
    qkv = torch.randn(9, 6, 16)
    k_cache, v_cache = caches(2, 2, 4, 16, 16)
    ops.reshape_and_cache(qkv[:, 2:4], qkv[:, 4:], k_cache, v_cache, torch.tensor([5, 2]))
    assert torch.equal(k_cache[1, :, 1], qkv[0, 2:4])
    assert torch.equal(v_cache[0, :, 2], qkv[1, 4:])
    assert k_cache.count_nonzero() == 2 * 2 * 16


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_slot_mapping_equals_the_reference(data):
    import npu_ops

    block_size, blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, block_size * blocks - 1), unique=True, max_size=12))
    slots = [s if data.draw(st.booleans()) else -1 for s in slots]
    key, value = torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 8)
    ours, theirs = caches(blocks, 2, block_size, 8, 8), caches(blocks, 2, block_size, 8, 8)
    mapping = torch.tensor(slots, dtype=torch.int64)
    torch.ops.npu_ops.reshape_and_cache(key, value, *ours, mapping)
    npu_ops.definitions.cache.reshape_and_cache.reference(key, value, *theirs, mapping)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_too_few_keys_are_refused(ops):
    with pytest.raises(RuntimeError, match="slots"):
        ops.reshape_and_cache(
            torch.randn(2, 1, 8), torch.randn(2, 1, 8), *caches(2, 1, 4, 8, 8), torch.tensor([0, 1, 2])
        )


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("scales", ["one", "head", "token"])
@pytest.mark.parametrize("size", [64, 36])
def test_codes_equal_the_reference(ops, isa, device, dtype, code, scales, size):
    import npu_ops

    key, value = (torch.randn(9, 3, size).to(dtype) for _ in range(2))
    key[0], key[1, 0], value[2, 0, :3] = 0, 1e-3, torch.tensor([1e4, -1e4, 2.0**-9])
    slots = torch.tensor([3, 17, -1, 4, 0, 8, 21, 9, 2])
    shape = {"one": (), "head": (3,), "token": (4, 3, 7)}[scales]
    results = []
    for op, where in ((npu_ops.definitions.cache.reshape_and_cache_quantized.reference, "cpu"), (None, device)):
        torch.manual_seed(1)
        # keys, then values, then their scales behind each other, as strided views of one buffer would be
        kv = torch.zeros(4, 3, 7, 2 * size, dtype=torch.uint8).to(where).view(code)
        scale = [torch.full(shape, 0.011).to(where), torch.full(shape, 0.5).to(where)]
        arguments = (key.to(where), value.to(where), kv[..., :size], kv[..., size:], *scale, slots.to(where))
        (op or ops.reshape_and_cache_quantized)(*arguments)
        results.append([kv.view(torch.uint8).cpu(), *(x.cpu() for x in scale)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_a_nan_is_in_its_codes_or_their_scale(ops, isa, dtype, code):
    """A scale of its own tells of it, a given one cannot: there e4m3 has a code for it, and int8 has none."""
    key, value, slots = torch.ones(2, 2, 40).to(dtype), torch.ones(2, 2, 40).to(dtype), torch.tensor([0, 1])
    key[0, 1, 3], value[1, 0, 39] = torch.nan, -torch.tensor(torch.nan)
    caches = [torch.zeros(1, 2, 4, 40, dtype=torch.uint8).view(code) for _ in range(2)]
    scales = [torch.zeros(1, 2, 4) for _ in range(2)]
    ops.reshape_and_cache_quantized(key, value, *caches, *scales, slots)
    assert scales[0].isnan().nonzero().tolist() == [[0, 1, 0]]
    assert scales[1].isnan().nonzero().tolist() == [[0, 0, 1]]
    ops.reshape_and_cache_quantized(key, value, *caches, torch.ones(2), torch.ones(2), slots)
    codes = [cache.float() for cache in caches]
    assert codes[0][0, 0, 0, 3] == codes[1][0, 0, 1, 0] == 1
    nans = codes[0][0, 1, 0, 3], codes[1][0, 0, 1, 39]
    assert all(nan.isnan() for nan in nans) if code is torch.float8_e4m3fn else nans == (0, 0)


def test_keys_and_values_may_have_scales_of_two_kinds(ops):
    """One for all heads beside one a head; only scales by token are another matter."""
    key, value = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    one, by_head, by_token = torch.tensor(0.02), torch.tensor([0.01, 0.02, 0.03]), torch.zeros(1, 3, 4)
    caches = [torch.zeros(1, 3, 4, 8, dtype=torch.int8) for _ in range(4)]
    slots = torch.tensor([1, 3])
    ops.reshape_and_cache_quantized(key, value, *caches[:2], one, by_head, slots)
    ops.reshape_and_cache_quantized(key, value, *caches[2:], one.expand(3).contiguous(), by_head, slots)
    assert caches[0].any()
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    with pytest.raises(RuntimeError, match="by token"):
        ops.reshape_and_cache_quantized(key, value, *caches[:2], one, by_token, slots)


@pytest.mark.parametrize("code", [None, torch.int8])
def test_slots_outside_of_the_cache_are_skipped(ops, isa, device, code):
    """A replay cannot raise, and must not write what is somebody else's."""
    key, value = torch.randn(3, 2, 8).to(device), torch.randn(3, 2, 8).to(device)
    whole = torch.zeros(3, 2, 2, 4, 8, dtype=code or torch.float32, device=device)
    slots = torch.tensor([12, 10**9, -(10**9)]).to(device)
    if code is None:
        ops.reshape_and_cache(key, value, whole[:, 0], whole[:, 1], slots)
    else:
        ops.reshape_and_cache_quantized(key, value, whole[:, 0], whole[:, 1], *[torch.ones(1).to(device)] * 2, slots)
    assert not whole.any()


@pytest.mark.parametrize(
    ("shape", "match"), [((2, 1, 4, 8), "both caches must have 3 blocks of 4"), ((3, 1, 2, 8), "3 blocks of 4")]
)
def test_caches_of_two_shapes_are_refused(ops, shape, match):
    rows, slots, whole = torch.randn(2, 1, 8), torch.tensor([0, 11]), torch.zeros(3, 1, 4, 8)
    with pytest.raises(RuntimeError, match=match):
        ops.reshape_and_cache(rows, rows, whole, torch.zeros(shape), slots)
    with pytest.raises(RuntimeError, match=match):
        codes = whole.char(), torch.zeros(shape, dtype=torch.int8)
        ops.reshape_and_cache_quantized(rows, rows, *codes, torch.ones(1), torch.ones(1), slots)
    with pytest.raises(RuntimeError, match="at least one token"):
        ops.reshape_and_cache(rows, rows, whole[:, :, :0], whole[:, :, :0], slots)
