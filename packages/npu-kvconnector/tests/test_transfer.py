"""Transfers: planned pages against a plain loop, and a host tier against a model of itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npu_kvconnector.errors import TransferError
from npu_kvconnector.tiers.host import allocate_pages
from npu_kvconnector.transfer import Lane, Run, copy_runs, plan_runs

BLOCKS, CHUNKS = 12, 6


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
def test_plan_pairs_each_block_with_its_page(case: tuple[list[list[int]], list[int], list[list[int]], int]) -> None:
    groups, indices, chunks, per_chunk = case
    plan = plan_runs(int32(joined(groups)), [len(g) for g in groups], indices, int32(joined(chunks)), per_chunk)
    for blocks, index, ids, runs in zip(groups, indices, chunks, plan, strict=True):
        places = range(index % per_chunk, index % per_chunk + len(blocks))
        expected = [
            (block, ids[p // per_chunk] * per_chunk + p % per_chunk) for block, p in zip(blocks, places, strict=True)
        ]
        assert [(r.device + i, r.host + i) for r in runs for i in range(r.length)] == expected


def test_plan_joins_neighbours() -> None:
    plan = plan_runs(int32([3, 4, 5, 9]), [4], [0], int32([2, 3]), 2)
    assert plan == [[Run(3, 4, 3), Run(9, 7, 1)]]


@pytest.mark.parametrize("chunks", [[], [1], [1, 2, 3]])
def test_plan_refuses_chunks_that_do_not_match(chunks: list[int]) -> None:
    with pytest.raises(TransferError, match="do not match"):
        plan_runs(int32([0, 1, 2]), [3], [0], int32(chunks), 2)


@pytest.mark.parametrize("run", [Run(BLOCKS, 0, 1), Run(0, CHUNKS, 1), Run(-1, 0, 1), Run(BLOCKS - 1, 0, 2)])
def test_copy_refuses_pages_outside(run: Run) -> None:
    device, host = torch.zeros(BLOCKS, 8, dtype=torch.int8), torch.ones(CHUNKS, 8, dtype=torch.int8)
    with pytest.raises(TransferError, match="outside"):
        copy_runs(device, host, [Run(0, 0, 1), run], to_host=False)
    assert not device.any()


@pytest.mark.parametrize("gap", [0, 24])
def test_bytes_come_back(gap: int) -> None:
    page = 40
    memory = torch.randint(-128, 128, (BLOCKS, page + gap), dtype=torch.int8)
    device, before = memory[:, :page], memory.clone()
    (host,) = allocate_pages([page], num_pages=CHUNKS, budget=CHUNKS * page)
    assert copy_runs(device, host, [Run(2, 1, 3), Run(9, 0, 1)], to_host=True) == 4 * page
    device.zero_()
    assert copy_runs(device, host, [Run(5, 1, 3), Run(0, 0, 1)], to_host=False) == 4 * page
    assert torch.equal(device[5:8], before[2:5, :page])
    assert torch.equal(device[0], before[9, :page])
    assert not device[1:5].any()
    assert not device[8:].any()
    assert torch.equal(memory[:, page:], before[:, page:])


def test_lane_reports_each_job_once_in_order() -> None:
    lane = Lane(torch.device("cpu"))
    lane.submit(7, lambda: 10)
    lane.submit(3, lambda: 20)
    lane.wait({3, 99})
    assert [(job.job_id, job.num_bytes) for job in lane.take_finished()] == [(7, 10), (3, 20)]
    assert lane.take_finished() == []


class HostTier(RuleBasedStateMachine):
    """Blocks of two tensors wander between device and host; a dictionary says what must be where."""

    @initialize(per_chunk=st.integers(1, 3))
    def build(self, per_chunk: int) -> None:
        self.per_chunk = per_chunk
        sizes = [16, 48]
        self.device = [torch.randint(-128, 128, (BLOCKS, size), dtype=torch.int8) for size in sizes]
        budget = CHUNKS * per_chunk * sum(sizes)
        self.host = allocate_pages(sizes, num_pages=CHUNKS * per_chunk, budget=budget)
        self.expected: dict[int, list[torch.Tensor]] = {}  # page -> bytes in each tensor
        self.lanes = {True: Lane(torch.device("cpu")), False: Lane(torch.device("cpu"))}

    def transfer(self, blocks: list[int], chunks: list[int], skip: int, *, to_host: bool) -> list[tuple[int, int]]:
        plan = plan_runs(int32(blocks), [len(blocks)], [skip], int32(chunks), self.per_chunk)
        pairs = zip(self.device, self.host, strict=True)
        self.lanes[to_host].submit(1, lambda: sum(copy_runs(d, h, plan[0], to_host=to_host) for d, h in pairs))
        (done,) = self.lanes[to_host].take_finished()
        assert done.num_bytes == len(blocks) * 64
        return [(r.device + i, r.host + i) for r in plan[0] for i in range(r.length)]

    @rule(data=st.data(), count=st.integers(1, 6))
    def store(self, data: st.DataObject, count: int) -> None:
        skip = data.draw(st.integers(0, self.per_chunk - 1))
        blocks = data.draw(st.permutations(range(BLOCKS)))[:count]
        needed = -(-(skip + count) // self.per_chunk)
        chunks = data.draw(st.permutations(range(CHUNKS)))[:needed]
        for block, page in self.transfer(blocks, chunks, skip, to_host=True):
            self.expected[page] = [tensor[block].clone() for tensor in self.device]

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, CHUNKS * self.per_chunk - 1))
        block = data.draw(st.integers(0, BLOCKS - 1))
        self.transfer([block], [page // self.per_chunk], page % self.per_chunk, to_host=False)
        for tensor, bytes_ in zip(self.device, self.expected.get(page, []), strict=False):
            assert torch.equal(tensor[block], bytes_)

    @rule(block=st.integers(0, BLOCKS - 1))
    def overwrite(self, block: int) -> None:
        for tensor in self.device:
            tensor[block] = torch.randint(-128, 128, tensor[block].shape, dtype=torch.int8)

    @invariant()
    def host_holds_what_was_stored(self) -> None:
        for page, pages in getattr(self, "expected", {}).items():
            assert all(torch.equal(tensor[page], bytes_) for tensor, bytes_ in zip(self.host, pages, strict=True))


HostTier.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_host_tier = HostTier.TestCase
