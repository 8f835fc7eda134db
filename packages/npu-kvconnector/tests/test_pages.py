"""Stacks of pages: copies between a device's layouts and the host tier's, against a model that moves byte by byte."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npu_kvconnector.pages import MOST_BYTES, Axis, PageMap, stack_up
from npu_kvconnector.transfer import Pairs, Run

BLOCKS, CHUNKS, PER_CHUNK = 7, 5, 2


def random_bytes(number: int) -> torch.Tensor:
    return torch.randint(-128, 128, (number,), dtype=torch.int8)


def moved(
    device: torch.Tensor, host: torch.Tensor, maps: list[PageMap], run: Run, *, per_chunk: int, to_host: bool
) -> None:
    """Move the bytes of a run one by one."""
    for page in maps:
        for i in range(run.length):
            chunk, inside = divmod(run.place + i, per_chunk)
            for fragment in range(page.fragments.number):
                at_device = page.device + (run.block + i) * page.block + fragment * page.fragments.device
                at_host = page.host + chunk * page.row + inside * page.page + fragment * page.fragments.host
                for byte in range(page.size):
                    if to_host:
                        host[at_host + byte] = device[at_device + byte]
                    else:
                        device[at_device + byte] = host[at_host + byte]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[PageMap], int, int, int]:
    """Pages of 1 to 4 layers, the blocks in a chunk, and the bytes of both memories."""
    layers, per_chunk = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size, pieces = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    page = size * pieces + draw(st.integers(0, 3))  # a page may be padded
    fragments = Axis(pieces, size, size)
    row = layers * page * per_chunk + draw(st.sampled_from([0, 5]))
    packed = draw(st.booleans())  # all layers of a block beside each other, or all blocks of a layer
    block = layers * page if packed else page
    far = page if packed else BLOCKS * page
    order = draw(st.permutations(range(layers))) if draw(st.booleans()) else list(range(layers))
    maps = [
        PageMap(layer * far, order[layer] * page * per_chunk, block, row, page, size, fragments)
        for layer in range(layers)
    ]
    return maps, per_chunk, layers * BLOCKS * page, CHUNKS * row


@settings(deadline=None)
@given(layouts(), st.data(), st.booleans())
def test_a_run_moves_the_bytes_that_its_pages_say(
    layout: tuple[list[PageMap], int, int, int], data: st.DataObject, to_host: bool
) -> None:
    maps, per_chunk, device_bytes, host_bytes = layout
    device, host = random_bytes(device_bytes), random_bytes(host_bytes)
    expected_device, expected_host = device.clone(), host.clone()
    place = data.draw(st.integers(0, CHUNKS * per_chunk - 1))
    most = CHUNKS - place if per_chunk == 1 else per_chunk - place % per_chunk
    length = data.draw(st.integers(1, min(most, BLOCKS)))
    run = Run(data.draw(st.integers(0, BLOCKS - length)), place, length)
    stacks = stack_up([(device, page) for page in maps], host, per_chunk)
    assert sum(stack.copy([run], to_host=to_host) for stack in stacks) == length * sum(
        page.size * page.fragments.number for page in maps
    )
    moved(expected_device, expected_host, maps, run, per_chunk=per_chunk, to_host=to_host)
    assert torch.equal(device, expected_device)
    assert torch.equal(host, expected_host)


@settings(deadline=None)
@given(layouts(), st.data(), st.booleans())
def test_addresses_are_of_the_bytes_that_pages_say(
    layout: tuple[list[PageMap], int, int, int], data: st.DataObject, to_host: bool
) -> None:
    maps, per_chunk, device_bytes, host_bytes = layout
    device, host = random_bytes(device_bytes), random_bytes(host_bytes)
    expected_device, expected_host = device.clone(), host.clone()
    number = data.draw(st.integers(0, min(BLOCKS, CHUNKS * per_chunk)))
    blocks = data.draw(st.permutations(range(BLOCKS)))[:number]
    places = data.draw(st.permutations(range(CHUNKS * per_chunk)))[:number]
    pairs = Pairs(np.array(blocks, dtype=np.int64), np.array(places, dtype=np.int64))
    for stack in stack_up([(device, page) for page in maps], host, per_chunk):
        for on_device, on_host, size in zip(*(column.tolist() for column in stack.addresses(pairs)), strict=True):
            ctypes.memmove(*((on_host, on_device) if to_host else (on_device, on_host)), size)
    for block, place in zip(blocks, places, strict=True):
        run = Run(block, place, 1)
        moved(expected_device, expected_host, maps, run, per_chunk=per_chunk, to_host=to_host)
    assert torch.equal(device, expected_device)
    assert torch.equal(host, expected_host)


@pytest.mark.parametrize("in_a_row", [True, False], ids=["all layers of a block", "all blocks of a layer"])
def test_pieces_in_a_row_on_both_sides_are_one(in_a_row: bool) -> None:
    layers, page = 4, 64
    per_chunk = 1 if in_a_row else BLOCKS
    block, far = (layers * page, page) if in_a_row else (page, BLOCKS * page)
    maps = [
        PageMap(layer * far, layer * page * per_chunk, block, layers * page * per_chunk, page, page)
        for layer in range(layers)
    ]
    device, host = random_bytes(layers * BLOCKS * page), random_bytes(layers * BLOCKS * page)
    (stack,) = stack_up([(device, each) for each in maps], host, per_chunk)
    everything = Pairs(np.arange(BLOCKS), np.arange(BLOCKS))
    assert stack.addresses(everything).sizes.tolist() == [layers * BLOCKS * page]
    apart = Pairs(np.arange(BLOCKS), np.arange(BLOCKS)[::-1].copy())
    pieces = BLOCKS if in_a_row else layers * BLOCKS
    assert len(stack.addresses(apart).sizes) == pieces


@pytest.mark.parametrize(
    ("change", "stacks"), [({}, 1), ({"size": 8}, 2), ({"device": 1000}, 2), ({"writers": (2, 0)}, 2)]
)
def test_layers_at_equal_distances_are_one_stack(change: dict[str, int], stacks: int) -> None:
    maps = [PageMap(layer * 100, layer * 16, 16, 64, 16, 16) for layer in range(3)]
    maps[2] = dataclasses.replace(maps[2], **change)
    device, host = random_bytes(2000), random_bytes(64 * CHUNKS)
    assert len(stack_up([(device, page) for page in maps], host, 1)) == stacks


def test_layers_of_other_memory_are_another_stack() -> None:
    maps = [(random_bytes(100), PageMap(0, layer * 16, 16, 64, 16, 16)) for layer in range(3)]
    assert len(stack_up(maps, random_bytes(64 * CHUNKS), 1)) == 3


def test_a_long_run_is_moved_in_parts() -> None:
    page = MOST_BYTES // 3
    device, host = random_bytes(4 * page), torch.zeros(4 * page, dtype=torch.int8)
    (stack,) = stack_up([(device, PageMap(0, 0, page, page, page, page))], host, 1)
    assert stack.copy([Run(0, 0, 4)], to_host=True) == 4 * page
    assert torch.equal(device, host)


class HostTier(RuleBasedStateMachine):
    """Blocks of two layers wander between device and host; a dictionary says what must be where."""

    @initialize(per_chunk=st.integers(1, 3))
    def build(self, per_chunk: int) -> None:
        self.per_chunk = per_chunk
        sizes = [16, 48]
        self.device = [random_bytes(BLOCKS * size).view(BLOCKS, size) for size in sizes]
        row = sum(sizes) * per_chunk
        self.host = torch.zeros(CHUNKS * row, dtype=torch.int8)
        self.expected: dict[int, list[torch.Tensor]] = {}  # place -> bytes of each layer
        maps = [
            (tensor, PageMap(0, start * per_chunk, size, row, size, size))
            for tensor, start, size in zip(self.device, (0, 16), sizes, strict=True)
        ]
        self.stacks = stack_up(maps, self.host, per_chunk)

    def move(self, block: int, place: int, *, to_host: bool) -> None:
        assert sum(stack.copy([Run(block, place, 1)], to_host=to_host) for stack in self.stacks) == 64

    @rule(block=st.integers(0, BLOCKS - 1), chunk=st.integers(0, CHUNKS - 1), inside=st.integers(0, 2))
    def store(self, block: int, chunk: int, inside: int) -> None:
        place = chunk * self.per_chunk + inside % self.per_chunk
        self.move(block, place, to_host=True)
        self.expected[place] = [tensor[block].clone() for tensor in self.device]

    @rule(data=st.data(), block=st.integers(0, BLOCKS - 1))
    def load(self, data: st.DataObject, block: int) -> None:
        if not self.expected:
            return
        place = data.draw(st.sampled_from(sorted(self.expected)))
        self.move(block, place, to_host=False)
        assert all(torch.equal(t[block], b) for t, b in zip(self.device, self.expected[place], strict=True))

    @rule(block=st.integers(0, BLOCKS - 1))
    def overwrite(self, block: int) -> None:
        for tensor in self.device:
            tensor[block] = random_bytes(tensor.shape[1])

    @invariant()
    def host_holds_what_was_stored(self) -> None:
        for place, pages in getattr(self, "expected", {}).items():
            chunk, inside = divmod(place, self.per_chunk)
            start = chunk * 64 * self.per_chunk
            at = [start + inside * 16, start + 16 * self.per_chunk + inside * 48]
            for first, page in zip(at, pages, strict=True):
                assert torch.equal(self.host[first : first + len(page)], page)


HostTier.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_host_tier = HostTier.TestCase
