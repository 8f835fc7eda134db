from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_ops.definitions.pages import copy_pages

ROW = (1, 0, 0, 1, 0, 0)  # one layer, one fragment


def random_bytes(number):
    return torch.randint(-128, 128, (number,), dtype=torch.int8)


@st.composite
def jobs(draw):
    """Memories of the device, one of the host, and stacks of layers that begin anywhere in them."""
    memories = [random_bytes(3000) for _ in range(draw(st.integers(1, 3)))]
    device, shapes, pairs = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        layers, fragments, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 150]))
        between = fragments * (size + 3)
        count = draw(st.integers(0, 4))
        device.append(draw(st.sampled_from(memories)))
        shapes += [layers, between + 5, between, fragments, size + 3, size, size, count]
        pairs += [(draw(st.integers(0, 1000)), draw(st.integers(0, 1000))) for _ in range(count)]
    return device, random_bytes(3000), shapes, torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


@settings(deadline=None, max_examples=60)
@given(jobs(), st.data())
def test_any_job_equals_the_reference(job, data):
    device, host, shapes, pairs = job
    before = [memory.clone() for memory in device]
    rows = sum(shapes[i] * shapes[i + 3] * shapes[i + 7] for i in range(0, len(shapes), 8))
    begin = data.draw(st.integers(0, rows))
    expected, done, expected_done = host.clone(), torch.tensor([begin]), torch.tensor([begin])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # places that two pairs write get the later one's
    try:
        torch.ops.npu_ops.copy_pages(device, host, shapes, pairs, done, True, math.inf)
    finally:
        torch.set_num_threads(threads)
    copy_pages.reference(before, expected, shapes, pairs, expected_done, True, math.inf)
    assert done.item() == expected_done.item() == rows
    assert torch.equal(host, expected)
    assert all(torch.equal(memory, old) for memory, old in zip(device, before, strict=True))


@pytest.mark.parametrize("size", [1, 63, 64, 511, 512, 4096, 65_536, 65_537])
@pytest.mark.parametrize("to_host", [True, False])
def test_rows_of_any_size_and_place(ops, isa, device, size, to_host):
    count, layers = 5, 2
    memory, host = random_bytes(layers * count * (size + 8) + 64), random_bytes(layers * count * (size + 5) + 64)
    stack = [layers, count * (size + 8), size + 5, *ROW[3:], size, count]
    pairs = torch.tensor([(3 + i * (size + 8), 1 + (count - 1 - i) * layers * (size + 5)) for i in range(count)])
    on_device, expected_memory, expected_host = memory.to(device), memory.clone(), host.clone()
    done, expected = torch.tensor([0]), torch.tensor([0])
    ops.copy_pages([on_device], host, stack, pairs, done, to_host, math.inf)
    copy_pages.reference([expected_memory], expected_host, stack, pairs, expected, to_host, math.inf)
    assert done.item() == expected.item() == count * layers
    assert torch.equal(on_device.cpu(), expected_memory)
    assert torch.equal(host, expected_host)


def test_calls_without_time_go_on_where_the_last_one_ended(ops, isa, device):
    rows, size = 3000, 1 << 12
    memory, host = random_bytes(rows * size), torch.zeros(rows * size, dtype=torch.int8)
    on_device, done = memory.to(device), torch.tensor([0])
    places = torch.arange(rows) * size
    pairs, calls, last = torch.stack((places, places.flip(0)), dim=1), 0, 0
    while done.item() < rows:
        ops.copy_pages([on_device], host, [*ROW, size, rows], pairs, done, True, 0.0)
        calls += 1
        assert last < done.item() <= rows
        last = done.item()
        written = host.view(rows, size).flip(0)
        assert torch.equal(written[:last], memory.view(rows, size)[:last])
        assert not written[last:].any()
    assert calls > 10


def test_more_stacks_than_a_launch_has(ops, isa, device):
    count = 70
    memories = [random_bytes(100).to(device) for _ in range(count)]
    host, done = torch.zeros(count * 100, dtype=torch.int8), torch.tensor([0])
    pairs = torch.tensor([(0, i * 100) for i in range(count)])
    while done.item() < count:
        ops.copy_pages(memories, host, [*ROW, 100, 1] * count, pairs, done, True, 0.0)
    assert torch.equal(host, torch.cat([memory.cpu() for memory in memories]))


@pytest.mark.parametrize(
    ("shape", "pair", "begin", "message"),
    [
        ((*ROW, 64, 1), (37, 0), 0, "reaches out"),
        ((*ROW, 64, 1), (0, 37), 0, "reaches out"),
        ((*ROW, 64, 1), (-1, 0), 0, "reaches out"),
        ((2, 40, 0, 1, 0, 0, 64, 1), (0, 0), 0, "reaches out"),
        ((1, 0, 0, 2, 0, 40, 64, 1), (0, 0), 0, "reaches out"),
        ((2, -1, 0, 1, 0, 0, 64, 1), (1, 0), 0, "not negative"),
        ((0, 0, 0, 1, 0, 0, 64, 1), (0, 0), 0, "must be positive"),
        ((*ROW, 64, 2), (0, 0), 0, "more pairs than there are"),
        ((*ROW, 64, 0), (0, 0), 0, "more pairs than stacks"),
        ((2**62, 4, 4, 1, 0, 0, 4, 1), (0, 0), 0, "beyond 2\\^63"),
        ((5, 2**62, 2**62, 1, 0, 0, 4, 1), (0, 0), 0, "beyond 2\\^63"),
        ((3, 2**63 - 1, 2**63 - 1, 1, 0, 0, 4, 1), (0, 0), 0, "beyond 2\\^63"),
        ((2**32, 0, 0, 2**32, 0, 0, 4, 1), (0, 0), 0, "beyond 2\\^63"),
        ((*ROW, 64, 1), (0, 0), 2, "progress"),
        ((*ROW, 64), (0, 0), 0, "numbers say"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_copied(ops, shape, pair, begin, message):
    memory, host = random_bytes(100), torch.zeros(100, dtype=torch.int8)
    with pytest.raises(RuntimeError, match=message):
        ops.copy_pages([memory], host, list(shape), torch.tensor([pair]), torch.tensor([begin]), True, math.inf)
    assert not host.any()


def test_a_job_through_the_device_is_one_launch(ops, npu):
    memory, host = random_bytes(1 << 16).to(npu), torch.zeros(1 << 16, dtype=torch.int8)
    places = torch.arange(64) * 1024
    pairs, done = torch.stack((places, places.flip(0)), dim=1), torch.tensor([0])
    ops.copy_pages([memory], host, [*ROW, 1024, 64], pairs, done, True, math.inf)
    before = torch.npu.launch_counts()
    done.zero_()
    ops.copy_pages([memory], host, [*ROW, 1024, 64], pairs, done, True, math.inf)
    after = torch.npu.launch_counts()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
    assert torch.equal(host.view(64, 1024).flip(0).ravel(), memory.cpu())
