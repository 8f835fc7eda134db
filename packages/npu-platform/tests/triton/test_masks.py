"""Masks: what is left out is not touched, whether a loop is written for the case that nothing is left out, or not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, COLUMNS = 4, 256
LARGEST = 2**31 - 1


@triton.jit
def block_kernel(x, o, row, rows, column, columns, use, R: tl.constexpr, C: tl.constexpr):
    i, j = tl.arange(0, R), tl.arange(0, C)
    mask = (row + i < rows)[:, None] & (column + j <= columns)[None, :] & (use > 0)
    place = i[:, None] * C + j[None, :]
    tl.store(o + place, tl.load(x + place, mask=mask, other=7.0) + 1, mask=mask)
    tl.store(o + R * C + place, tl.load(x + place, mask=mask & (i[:, None] % 3 != 1), other=7.0))


def expected(x: torch.Tensor, row: int, rows: int, column: int, columns: int, use: int) -> torch.Tensor:
    """Return both results of the kernel by torch, whose integers of 32 bits overflow as Triton's do."""
    i, j = torch.arange(ROWS, dtype=torch.int32)[:, None], torch.arange(COLUMNS, dtype=torch.int32)[None, :]
    mask = (i + torch.tensor(row, dtype=torch.int32) < rows) & (j + torch.tensor(column, dtype=torch.int32) <= columns)
    mask = mask & (use > 0)
    return torch.stack([torch.where(mask, x + 1, 0.0), torch.where(mask & (i % 3 != 1), x, 7.0)])


numbers = st.one_of(
    st.integers(-ROWS, COLUMNS + ROWS),
    st.integers(LARGEST - 2 * COLUMNS, LARGEST),
    st.integers(-LARGEST - 1, -LARGEST + 2 * COLUMNS),
)


@settings(max_examples=150, deadline=None)
@given(row=numbers, rows=numbers, column=numbers, columns=numbers, use=st.integers(0, 3))
def test_what_a_mask_leaves_out_is_not_touched(row, rows, column, columns, use):
    x = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    out = torch.zeros(2, ROWS, COLUMNS, device="npu")
    block_kernel[(1,)](x.to("npu"), out, row, rows, column, columns, use, ROWS, COLUMNS)
    assert torch.equal(out.cpu(), expected(x, row, rows, column, columns, use))


@triton.jit
def vector_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.mark.parametrize("elements", [0, 1, 255, 256, 257, 1000, 1024])
def test_a_vector_that_ends_within_a_block(elements):
    x, out = torch.randn(1024), torch.zeros(1024, device="npu")
    vector_kernel[(4,)](x.to("npu"), out, elements, 256)
    assert torch.equal(out.cpu(), torch.where(torch.arange(1024) < elements, x * 2, 0.0))


@triton.jit
def steps_kernel(x, o, n, B: tl.constexpr):
    total = tl.zeros((B,), dtype=tl.float32)
    for begin in range(0, n, B):
        i = tl.arange(0, B)
        total += tl.load(x + begin + i, mask=i < n - begin, other=0.0)
    tl.store(o + tl.arange(0, B), total)


@pytest.mark.parametrize("elements", [1, 128, 300, 512])
def test_the_last_step_of_a_loop_has_a_mask(elements):
    x, out = torch.randn(512), torch.zeros(128, device="npu")
    steps_kernel[(1,)](x.to("npu"), out, elements, 128)
    kept = torch.where(torch.arange(512) < elements, x, 0.0)
    torch.testing.assert_close(out.cpu(), kept.view(4, 128).sum(0))


def test_a_loop_is_written_without_masks_too(kernel_cache):
    out = torch.zeros(1024, device="npu")
    vector_kernel[(4,)](torch.ones(1024, device="npu"), out, 1024, 256)
    sources = [path.read_text() for path in Path(kernel_cache).glob("*/vector_kernel.cpp")]
    found = {tuple(re.findall(r"constexpr bool all0 = (\w+), some0 = (\w+);", source)) for source in sources}
    of_a_loop = (("true", "true"), ("true", "true"), ("false", "true"), ("false", "false"))
    assert found == {2 * of_a_loop}  # loads, stores


@triton.jit
def corner_kernel(a, b, o, rows, n: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + j[None, :])
    tl.store(o + i[:, None] * n + j[None, :], tl.dot(left, right), mask=(i[:, None] < rows) & (j[None, :] < n))


@pytest.mark.parametrize("rows", [5, 16])
def test_the_corner_of_a_block_is_what_was_computed(rows):
    """It was zeros where the compiler gathered by a mask of ones, whose sign says that nothing is let through."""
    a, b, out = torch.randn(128, 16), torch.randn(16, 256), torch.full((16, 16), -7.0, device="npu")
    corner_kernel[(1,)](a.to("npu"), b.to("npu"), out, rows, 16, 128, 256, 16)
    assert torch.allclose(out.cpu()[:rows], (a @ b)[:rows, :16], atol=1e-4)
    assert torch.equal(out.cpu()[rows:], torch.full((16 - rows, 16), -7.0))
