"""Transfers: planned pairs against a plain loop, runs, and the order and the errors of a lane."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_kvconnector.errors import TransferError
from npu_kvconnector.transfer import Lane, Pace, Pairs, Run, join_runs, plan_pairs

BLOCKS = 12


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def joined(lists: list[list[int]]) -> list[int]:
    return [value for values in lists for value in values]


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]], int]:
    """Blocks and first block index of each of 1 to 3 groups, the chunks they lie in, and the blocks in a chunk."""
    per_chunk = draw(st.integers(1, 4))
    groups, indices, chunks = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        groups.append(draw(st.lists(st.integers(0, BLOCKS - 1), max_size=7, unique=True)))
        indices.append(draw(st.integers(0, 9)))
        count = -(-(indices[-1] % per_chunk + len(groups[-1])) // per_chunk) if groups[-1] else 0
        chunks.append(draw(st.lists(st.integers(0, 20), min_size=count, max_size=count, unique=True)))
    return groups, indices, chunks, per_chunk


@given(transfers())
def test_plan_pairs_each_block_with_its_place(case: tuple[list[list[int]], list[int], list[list[int]], int]) -> None:
    groups, indices, chunks, per_chunk = case
    plan = plan_pairs(int32(joined(groups)), [len(g) for g in groups], indices, int32(joined(chunks)), per_chunk)
    for blocks, index, ids, pairs in zip(groups, indices, chunks, plan, strict=True):
        places = range(index % per_chunk, index % per_chunk + len(blocks))
        expected = [
            (block, ids[p // per_chunk] * per_chunk + p % per_chunk) for block, p in zip(blocks, places, strict=True)
        ]
        runs = join_runs(pairs, per_chunk)
        assert [(run.block + i, run.place + i) for run in runs for i in range(run.length)] == expected
        if per_chunk > 1:
            assert all(run.place % per_chunk + run.length <= per_chunk for run in runs)


def test_neighbours_are_joined() -> None:
    pairs = Pairs(np.array([3, 4, 5, 9]), np.array([4, 5, 6, 7]))
    assert join_runs(pairs, 1) == [Run(3, 4, 3), Run(9, 7, 1)]
    assert join_runs(pairs, 2) == [Run(3, 4, 2), Run(5, 6, 1), Run(9, 7, 1)]
    assert join_runs(Pairs(np.array([]), np.array([])), 1) == []


@pytest.mark.parametrize("chunks", [[], [1], [1, 2, 3]])
def test_plan_refuses_chunks_that_do_not_match(chunks: list[int]) -> None:
    with pytest.raises(TransferError, match="do not match"):
        plan_pairs(int32([0, 1, 2]), [3], [0], int32(chunks), 2)


def test_lane_reports_each_job_once_in_order() -> None:
    lane = Lane(torch.device("cpu"))
    lane.submit(7, lambda: iter([4, 6]))
    lane.submit(3, lambda: iter([20]))
    lane.wait({3, 99})
    assert lane.pending_bytes == 30
    assert [(job.job_id, job.num_bytes, job.error) for job in lane.take_finished()] == [(7, 10, None), (3, 20, None)]
    assert lane.take_finished() == []


@pytest.mark.parametrize("error", [RuntimeError("the device"), TransferError("the plan")])
def test_what_a_copy_raises_is_the_job_s_error(error: Exception) -> None:
    def copy() -> Iterator[int]:
        yield 3
        raise error

    lane = Lane(torch.device("cpu"))
    lane.submit(1, copy)
    lane.submit(2, lambda: iter([5]))
    assert [(job.job_id, job.error) for job in lane.take_finished()] == [(1, error), (2, None)]


def test_a_lane_with_little_time_issues_a_piece_a_call_in_order() -> None:
    lane = Lane(torch.device("cpu"), seconds=0.0)
    issued: list[int] = []

    def copy(numbers: range) -> Iterator[int]:
        for number in numbers:
            issued.append(number)
            yield 1

    lane.submit(1, lambda: copy(range(4)))
    lane.submit(2, lambda: copy(range(4, 8)))
    assert issued == [0, 1]
    assert lane.take_finished() == []
    lane.wait({99})
    assert issued == [0, 1, 2]
    lane.wait({1})
    assert issued == list(range(8))
    assert [(job.job_id, job.num_bytes) for job in lane.take_finished()] == [(1, 4), (2, 4)]


def test_copies_take_a_share_of_a_step_and_more_where_nobody_waits() -> None:
    now = [10.0]
    pace = Pace(lambda: now[0])
    assert pace.begin_step(0.0, is_idle=False) == 0.002  # the first
    now[0] += 0.022
    assert pace.begin_step(0.002, is_idle=False) == pytest.approx(0.001)  # of the 20 ms that were not copies
    now[0] += 3.0
    assert pace.begin_step(0.0, is_idle=False) == 0.002  # after a long prompt
    now[0] += 0.022
    assert pace.begin_step(0.03, is_idle=False) == 0.0
    assert pace.begin_step(0.0, is_idle=True) == 0.02


def test_a_lane_tells_what_it_has_spent() -> None:
    lane = Lane(torch.device("cpu"))
    assert lane.take_spent() == 0.0
    lane.submit(1, lambda: iter([4]))
    assert lane.take_spent() > 0.0
    assert lane.take_spent() == 0.0
