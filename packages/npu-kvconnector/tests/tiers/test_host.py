"""The host tier's memory: one region within its budget, taken when it is made, by one worker after another."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from npu_kvconnector.errors import CapacityError
from npu_kvconnector.tiers.host import LOCK, allocate_pages

TAKE = """
from pathlib import Path
from npu_kvconnector.tiers.host import allocate_pages
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
allocate_pages([8], num_pages=1, budget=8)
before = resident()
pages = allocate_pages([3 << 10] * 20, num_pages=1 << 10, budget=60 << 20)
print(resident() - before)
"""


def test_pages_lie_in_one_region_and_hold_their_own_bytes() -> None:
    sizes = [16, 48, 1]
    pages = allocate_pages(sizes, num_pages=3, budget=3 * 65)
    assert [tuple(tensor.shape) for tensor in pages] == [(3, size) for size in sizes]
    assert {tensor.untyped_storage().data_ptr() for tensor in pages} == {pages[0].data_ptr()}
    assert pages[0].untyped_storage().nbytes() == 3 * 65
    for number, tensor in enumerate(pages):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in pages] == [[0], [1], [2]]
    assert all(tensor.is_contiguous() for tensor in pages)


def test_tier_is_bounded() -> None:
    with pytest.raises(CapacityError, match="share of 99"):
        allocate_pages([50], num_pages=2, budget=99)
    with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
        allocate_pages([2**40], num_pages=2**10, budget=2**60)


def test_its_memory_is_there_before_anything_is_stored() -> None:
    done = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) >= 60 << 20


def test_a_worker_waits_for_the_one_that_takes_memory() -> None:
    allocate_pages([8], num_pages=1, budget=8)
    other = threading.Thread(target=allocate_pages, args=([8],), kwargs={"num_pages": 1, "budget": 8})
    descriptor = os.open(LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    os.close(descriptor)
    other.join(60)
    assert not other.is_alive()
