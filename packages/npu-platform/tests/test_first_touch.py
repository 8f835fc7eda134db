"""Memory is resident before anybody wrote it, keeps its contents, and is left alone once it was said to stop."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time

import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_platform.first_touch import PART, FirstTouch, in_turns, ranges_of

LARGE = 8 * PART


def resident(address: int, size: int) -> int:
    """Return how many bytes of a range the host has given out."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_a_caches_memory_is_touched_and_keeps_its_contents() -> None:
    cache = torch.zeros(2, LARGE // 2, dtype=torch.uint8, device="npu")
    cache[1, 5] = 7
    ranges = ranges_of([cache])
    assert len(ranges) == 2
    touch = FirstTouch(ranges, LARGE, patience=0)
    assert touch.join(60)
    assert touch.touched == sum(size for _, size in ranges)
    assert all(resident(*each) == each[1] for each in ranges)
    assert cache.sum().item() == 7


def test_no_more_is_touched_than_was_allowed() -> None:
    with mmap.mmap(-1, LARGE) as memory:
        place = ctypes.c_char.from_buffer(memory)
        touch = FirstTouch([(ctypes.addressof(place), LARGE)], 2 * PART, patience=0)
        assert touch.join(60)
        assert touch.touched == 2 * PART
        assert resident(ctypes.addressof(place), LARGE) < LARGE
        del place


def test_one_that_was_stopped_touches_nothing() -> None:
    before = time.monotonic()
    touch = FirstTouch([(0, LARGE)], LARGE, patience=600)
    touch.stop()
    assert time.monotonic() - before < 60
    assert touch.touched == 0


def test_memory_that_is_not_there_ends_it_quietly() -> None:
    touch = FirstTouch([(mmap.PAGESIZE, LARGE)], LARGE, patience=0)
    assert touch.join(60)
    assert touch.touched == 0


def test_layers_that_share_a_cache_have_one_range() -> None:
    cache = torch.zeros(LARGE, dtype=torch.uint8, device="npu")
    assert len(ranges_of([cache, cache])) == 1


@given(st.lists(st.integers(1, 5 * PART), max_size=5))
def test_turns_cover_each_range_once(sizes: list[int]) -> None:
    ranges = [(number << 40, size) for number, size in enumerate(sizes, 1)]
    parts = list(in_turns(ranges))
    assert sum(size for _, size in parts) == sum(sizes)
    for start, size in ranges:
        mine = [part for part in parts if part[0] >> 40 == start >> 40]
        assert mine == sorted(mine)
        assert mine[0][0] == start
        assert mine[-1][0] + mine[-1][1] == start + size
        assert all(a + length == b for (a, length), (b, _) in itertools.pairwise(mine))
