"""Operations that move elements, and memory: against torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def shape_kernel(x, o, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    flat = tl.arange(0, M * N)
    a = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(o + j[:, None] * M + i[None, :], tl.trans(a))
    tl.store(o + M * N + flat, tl.reshape(a * 2, (M * N,)))
    tl.store(o + 2 * M * N + i[:, None] * N + j[None, :], a + tl.sum(a, 1)[:, None] + tl.sum(a, 0)[None, :])
    left, right = tl.split(tl.reshape(a, (M * N // 2, 2)))
    half = tl.arange(0, M * N // 2)
    tl.store(o + 3 * M * N + half, left)
    tl.store(o + 3 * M * N + M * N // 2 + half, right)
    tl.store(o + 4 * M * N + flat, tl.reshape(tl.join(left + 1, right + 2), (M * N,)))
    tl.store(o + 5 * M * N + flat, tl.cat(left, right, can_reorder=True))
    tl.store(o + 6 * M * N + i[:, None] * N + j[None, :], tl.flip(a, 1))
    tl.store(o + 7 * M * N + i[:, None] * N + j[None, :], tl.gather(a, (j[None, :] + i[:, None]) % N, 1))
    tl.store(o + 8 * M * N + flat, tl.sort(tl.reshape(a, (M * N,))))
    cube = tl.permute(tl.reshape(a, (M, 2, N // 2)), (1, 2, 0))
    tl.store(o + 9 * M * N + flat, tl.reshape(cube, (M * N,)))
    tl.store(
        o + 10 * M * N + i[:, None] * N + j[None, :], tl.where(i[:, None] > j[None, :], a, i[:, None].to(tl.float32))
    )
    tl.store(
        o + 11 * M * N + i[:, None] * N + j[None, :],
        tl.interleave(tl.reshape(left, (M, N // 2)), tl.reshape(right, (M, N // 2))),
    )


@pytest.mark.parametrize(("m", "n"), [(8, 16), (4, 4)])
def test_shapes(m, n):
    x = torch.randn(m, n)
    out = torch.empty(12 * m * n, device="npu")
    shape_kernel[(1,)](x.to("npu"), out, m, n)
    left, right = x.flatten()[::2], x.flatten()[1::2]
    rows, columns = torch.arange(m)[:, None], torch.arange(n)[None, :]
    expected = [
        x.T, x * 2, x + x.sum(1, keepdim=True) + x.sum(0, keepdim=True), torch.cat([left, right]),
        torch.stack([left + 1, right + 2], 1), torch.cat([left, right]), x.flip(1), x.gather(1, (rows + columns) % n),
        x.flatten().sort().values, x.view(m, 2, n // 2).permute(1, 2, 0), torch.where(rows > columns, x, rows.float()), x,
    ]  # fmt: skip
    torch.testing.assert_close(out.cpu().view(12, -1), torch.stack([each.flatten() for each in expected]))


@triton.jit
def masked_kernel(x, places, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    place = tl.load(places + i, mask=mask, other=-1)
    value = tl.load(x + place, mask=place >= 0, other=7.0, cache_modifier=".cg", eviction_policy="evict_last")
    tl.store(o + i, value, mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_masks_keep_addresses_untouched(dtype):
    x = torch.randint(0, 2, (50,)).to(dtype)
    places = torch.randint(0, 50, (100,)).masked_fill(torch.rand(100) < 0.3, -1)
    out = torch.zeros(128, dtype=dtype, device="npu")
    masked_kernel[(4,)](x.to("npu"), places.to("npu"), out, 100, 32)
    expected = torch.where(places < 0, torch.tensor(7).to(dtype), x[places.clamp_min(0)])
    assert torch.equal(out.cpu()[:100], expected)
    assert not out.cpu()[100:].any()


@triton.jit
def overlapping_kernel(x, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i + 1, tl.load(x + i))


def test_all_loads_come_before_the_stores_of_an_operation():
    x = torch.arange(65, dtype=torch.float32, device="npu")
    overlapping_kernel[(1,)](x, 64)
    assert x.tolist() == [0, *range(64)]


@triton.jit
def table_kernel(addresses, o, N: tl.constexpr):
    row = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, N)
    tl.store(o + tl.program_id(0) * N + i, tl.load(row + i))


def test_addresses_from_memory():
    rows = [torch.randn(16, device="npu") for _ in range(3)]
    table = torch.tensor([row.data_ptr() for row in rows], dtype=torch.int64, device="npu")
    out = torch.empty(3, 16, device="npu")
    table_kernel[(3,)](table, out, 16)
    assert torch.equal(out.cpu(), torch.stack(rows).cpu())


@triton.jit
def descriptor_kernel(x, given, o, M, N, B: tl.constexpr):
    made = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    out = tl.make_tensor_descriptor(o, [M, N], [N, 1], [B, B])
    row, column = tl.program_id(0) * B, tl.program_id(1) * B
    out.store([row, column], made.load([row, column]) + given.load([row, column]))


def test_descriptors_of_tensors():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, y = torch.randn(20, 24), torch.randn(20, 24)
    out = torch.empty(20, 24, device="npu")
    given = TensorDescriptor.from_tensor(y.to("npu"), [8, 8])
    descriptor_kernel[(3, 3)](x.to("npu"), given, out, 20, 24, 8)
    torch.testing.assert_close(out.cpu(), x + y)


@triton.jit
def large_kernel(x, o, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    tl.store(o + at, a / tl.sum(a, 1)[:, None] + tl.max(a, 0)[None, :])


def test_arrays_larger_than_a_stack():
    x = torch.rand(512, 1024) + 0.1
    out = torch.empty(512, 1024, device="npu")
    large_kernel[(1,)](x.to("npu"), out, 512, 1024)
    torch.testing.assert_close(out.cpu(), x / x.sum(1, keepdim=True) + x.amax(0), rtol=1e-5, atol=1e-5)


@triton.jit
def grid_kernel(o):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(o + place, x * 10000 + y * 100 + z)


def test_every_program_of_a_grid_runs_once():
    out = torch.full((7 * 5 * 3,), -1, dtype=torch.int32, device="npu")
    grid_kernel[(7, 5, 3)](out)
    expected = [x * 10000 + y * 100 + z for z in range(3) for y in range(5) for x in range(7)]
    assert out.tolist() == expected


@triton.jit
def copies_kernel(sources, targets, sizes, B: tl.constexpr):
    source = tl.load(sources + tl.program_id(0))
    target = tl.load(targets + tl.program_id(0))
    size = tl.load(sizes + tl.program_id(0))
    to_the_left = target < source and target + size > source
    offsets = tl.arange(0, B)
    for i in range(0, size, B):
        mask = i + offsets < size
        data = tl.load((source + i + offsets).to(tl.pointer_type(tl.uint8)), mask=mask)
        if to_the_left:
            tl.debug_barrier()
        tl.store((target + i + offsets).to(tl.pointer_type(tl.uint8)), data, mask=mask)


def test_addresses_that_are_kept_across_a_barrier():
    """As vLLM copies states of Mamba: from and to addresses, parts of which may overlap."""
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    moved = data.to("npu")
    sources, targets, sizes = [3, 2000], [0, 4000], [1500, 700]
    tables = [
        torch.tensor([moved.data_ptr() + offset for offset in offsets]).to("npu") for offsets in (sources, targets)
    ]
    copies_kernel[(2,)](*tables, torch.tensor(sizes).to("npu"), B=1024)
    expected = data.clone()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        expected[target : target + size] = data[source : source + size]
    assert torch.equal(moved.cpu(), expected)
