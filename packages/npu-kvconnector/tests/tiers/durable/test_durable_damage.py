"""A store that ended unclean or was damaged: what is left is right, and what is lost can be stored again."""

from __future__ import annotations

import errno
import itertools
import os
import random
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from npu_kvconnector.tiers.durable import files, segments
from npu_kvconnector.tiers.durable.files import PAGE
from npu_kvconnector.tiers.durable.index import decode_entry, encode_entry
from npu_kvconnector.tiers.durable.recovery import newest_index
from npu_kvconnector.tiers.durable.store import DurableStore
from tests.support.durable_store import held, name, open_store, put

if TYPE_CHECKING:
    from pathlib import Path


def test_an_unclean_end_loses_nothing_that_was_written(store: DurableStore, folder: Path) -> None:
    put(store, *range(5))
    store.commit()
    put(store, *range(5, 10))
    store.abandon()  # the lock is free, and the index does not know the last five
    again = open_store(folder)
    assert again.recovered.adopted == 5
    assert held(again, range(10)) == list(range(10))
    again.close()
    store.index.close()


def test_a_torn_tail_ends_where_it_is_torn(store: DurableStore, folder: Path) -> None:
    put(store, *range(4))
    store.abandon()
    [segment] = (folder / "segments").glob("*.seg")
    with segment.open("r+b") as file:
        file.seek(PAGE + 3 * (PAGE + 5 * PAGE) + 2 * PAGE)  # in the payload of the fourth
        file.write(bytes(PAGE))
    again = open_store(folder)
    assert again.recovered.adopted == 3
    assert name(3) not in again
    assert held(again, range(4)) == [0, 1, 2]
    again.close()
    store.index.close()


@pytest.mark.parametrize("part", ["data.mdb", "segment"])
@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.nightly)])
def test_bit_flips_cost_blocks_and_nothing_else(rounds: int, part: str, store: DurableStore, folder: Path) -> None:
    put(store, *range(60))
    store.close()
    for seed in range(rounds):
        chance = random.Random(seed)
        index = newest_index(folder)
        assert index is not None
        segment = chance.choice(sorted((folder / "segments").glob("*.seg")))
        path = index / "data.mdb" if part == "data.mdb" else segment
        data = bytearray(path.read_bytes())
        for _ in range(20):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        again = open_store(folder)
        held(again, range(60))  # checks each block
        put(again, *range(60))  # what was lost can be stored again
        assert held(again, range(60)) == list(range(60))
        again.close()


def test_a_damaged_block_is_given_up_and_can_be_stored_again(store: DurableStore, folder: Path) -> None:
    put(store, 1, 2)
    store.commit()
    [segment] = (folder / "segments").glob("*.seg")
    with segment.open("r+b") as file:
        file.seek(3 * PAGE)
        file.write(b"not what was stored")
    assert held(store, range(3)) == [2]
    assert store.corrupt == 1
    assert name(1) not in store
    store.commit()
    [(_, offset, about)] = store.index.marks()
    assert offset == PAGE
    assert about["name"] == name(1).hex()
    put(store, 1)
    assert held(store, range(3)) == [1, 2]


@pytest.mark.parametrize("what", ["truncate", "remove", "replace", "swap", "superblock"])
def test_segments_that_are_not_what_they_were(what: str, store: DurableStore, folder: Path) -> None:
    put(store, *range(80))
    store.close()
    first, second = sorted((folder / "segments").glob("*.seg"))[:2]
    if what == "truncate":
        os.truncate(first, 3 * PAGE)
    elif what == "remove":
        first.unlink()
    elif what == "replace":
        first.write_bytes(b"somebody else's file")
    elif what == "swap":
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
    else:
        with first.open("r+b") as file:
            file.write(bytes(8))
    again = open_store(folder)
    there = held(again, range(80))
    assert len(there) < 80
    put(again, *range(80))
    assert held(again, range(80)) == list(range(80))
    again.close()


def test_without_an_index_the_blocks_are_found(store: DurableStore, folder: Path) -> None:
    put(store, *range(60))
    store.close()
    index = newest_index(folder)
    assert index is not None
    (index / "data.mdb").write_bytes(random.Random(0).randbytes(100_000))
    again = open_store(folder)
    assert again.recovered.was_rebuilt
    assert held(again, range(60)) == list(range(60))
    assert list((folder / "quarantine").iterdir())
    again.close()


@pytest.mark.parametrize("lost", ["an entry", "a segment", "a newer entry"])
def test_an_index_of_before_is_noticed(lost: str, store: DurableStore, folder: Path) -> None:
    """As where the disk gives back a page that is whole, but older than the last transaction."""
    put(store, *range(60))
    store.close()
    index = newest_index(folder)
    assert index is not None
    with lmdb.open(os.fspath(index), max_dbs=8) as environment:
        blocks, segments = environment.open_db(b"blocks"), environment.open_db(b"segments")
        with environment.begin(write=True) as transaction:
            if lost == "an entry":
                assert transaction.delete(name(7), db=blocks)
            elif lost == "a segment":
                assert transaction.delete((1).to_bytes(8, "big"), db=segments)
            else:
                entry = decode_entry(name(7), transaction.get(name(7), db=blocks))
                assert entry is not None
                older = entry._replace(used_tick=entry.used_tick + 1)
                transaction.put(name(7), encode_entry(name(7), older), db=blocks)
    again = open_store(folder)
    assert again.recovered.was_rebuilt
    assert held(again, range(60)) == list(range(60))
    again.close()
    third = open_store(folder)  # the new one is whole
    assert not third.recovered.was_rebuilt
    assert held(third, range(60)) == list(range(60))
    third.close()


@pytest.mark.parametrize("failing", [5, 40])
def test_a_disk_that_fails_for_a_moment_costs_no_blocks(
    failing: int, store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(60))
    store.close()
    index = newest_index(folder)
    assert index is not None
    (index / "data.mdb").write_bytes(random.Random(0).randbytes(100_000))  # so that every record is looked at
    reads = itertools.count()

    def read_at(*arguments: Any) -> int:
        if next(reads) == failing:
            raise OSError(errno.EIO, "for a moment")
        return files.read_at(*arguments)

    monkeypatch.setattr(segments, "read_at", read_at)
    again = open_store(folder)
    assert next(reads) > failing
    assert held(again, range(60)) == list(range(60))
    again.close()
