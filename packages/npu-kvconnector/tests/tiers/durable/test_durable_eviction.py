"""Which blocks are left when a store is full: after a scan, after prompts that came back, and after a restart."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from npu_kvconnector.tiers.durable.eviction import POLICIES, AdaptiveHeat
from npu_kvconnector.tiers.durable.index import Entry
from npu_kvconnector.tiers.durable.segments import Place
from npu_kvconnector.tiers.durable.store import DurableStore

if TYPE_CHECKING:
    from pathlib import Path

SIZE, QUOTA = 4096, 6 * 2**20  # about 230 blocks, in segments of 15
REALM = bytes(16)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def open_store(folder: Path, policy: str) -> DurableStore:
    return DurableStore(folder, quota=QUOTA, block_bytes=SIZE, commit_seconds=0, eviction_policy=policy)


def put(store: DurableStore, numbers: range) -> None:
    for number in numbers:
        store.put(name(number), REALM, memoryview(random.Random(number).randbytes(SIZE)))


def use(store: DurableStore, numbers: range) -> int:
    """Read blocks, store those that are gone, and return how many were there."""
    found = 0
    for number in numbers:
        if store.read(name(number)) is None:
            put(store, range(number, number + 1))
        else:
            found += 1
    return found


def entry(segment: int, *, stored: int, used: int) -> Entry:
    return Entry(Place(segment, 4096, SIZE), SIZE, 0, REALM, 0.0, stored, used)


@pytest.mark.parametrize(("policy", "least", "most"), [("lru", 0, 0), ("arc", 30, 30)])
def test_what_is_used_again_outlives_a_scan_by_arc(policy: str, least: int, most: int, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", policy)
    hot = range(30)
    put(store, hot)
    use(store, hot)
    put(store, range(1000, 2000))  # four times the store, never asked for again
    assert least <= sum(name(number) in store for number in hot) <= most
    assert store.evicted > 700
    store.close()


def test_arc_keeps_what_was_used_over_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", "arc")
    put(store, range(30))
    use(store, range(30))
    store.close()
    again = open_store(tmp_path / "store", "arc")
    put(again, range(1000, 2000))
    assert use(again, range(30)) == 30
    again.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_new_blocks_find_room_whatever_was_used(policy: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", policy)
    for start in range(0, 2000, 100):  # each block is used: nothing but what was used could stay
        put(store, range(start, start + 100))
        use(store, range(start, start + 100))
        assert all(name(number) in store for number in range(start + 80, start + 100))
    store.close()


def test_what_returns_moves_the_target() -> None:
    heat = AdaptiveHeat()
    once, again = entry(1, stored=1, used=1), entry(2, stored=2, used=3)
    newer = entry(3, stored=4, used=4)
    for each in (once, again, newer):
        heat.add(each)
    assert heat.coldest({1: SIZE, 2: SIZE, 3: SIZE}, keep=None) == 1  # older than 3, and not used
    heat.drop(1, [(name(1), once)])
    assert heat.returns(name(1))
    assert heat.target > 0
    assert not heat.returns(name(1))
    assert heat.coldest({2: SIZE, 3: SIZE}, keep=None) == 2  # those not used have their share now
    heat.drop(2, [(name(2), again)])
    before = heat.target
    assert heat.returns(name(2))
    assert heat.target < before
    assert not heat.returns(name(3))


def test_a_block_that_returns_counts_as_used(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", "arc")
    put(store, range(1))
    put(store, range(1000, 1400))
    assert name(0) not in store
    put(store, range(1))
    found = store.find(name(0))
    assert found is not None
    assert found.used_tick > found.stored_tick
    store.close()
