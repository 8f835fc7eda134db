"""A store of blocks: kept through restarts, within its quota, and in the order of its commits."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npu_kvconnector.errors import StoreError
from npu_kvconnector.tiers.durable import segments
from npu_kvconnector.tiers.durable.files import PAGE, is_aligned, page_buffer
from npu_kvconnector.tiers.durable.lock import StoreBusyError
from npu_kvconnector.tiers.durable.store import DurableStore, Record
from tests.support.durable_store import QUOTA, REALM, SIZE, block, held, name, open_store, put

if TYPE_CHECKING:
    from pathlib import Path


def test_blocks_outlive_the_store(store: DurableStore, folder: Path) -> None:
    put(store, *range(20))
    assert held(store, range(20)) == list(range(20))  # before they are durable
    store.close()
    again = open_store(folder)
    assert held(again, range(21)) == list(range(20))
    assert again.recovered.adopted == 0
    again.close()


def test_a_block_is_stored_once(store: DurableStore) -> None:
    assert store.put(name(1), REALM, memoryview(block(1)))
    assert not store.put(name(1), REALM, memoryview(block(1)))
    store.commit()
    assert not store.put(name(1), REALM, memoryview(block(1)))


def test_memory_that_begins_at_a_page_is_written_from_where_it_is(store: DurableStore) -> None:
    buffer = page_buffer(4 * PAGE)
    buffer[:] = block(7, len(buffer))
    assert is_aligned(buffer)
    store.put(name(7), REALM, buffer)
    read = store.read(name(7))
    assert read is not None
    assert bytes(read.payload) == bytes(buffer)


def test_without_o_direct_the_bytes_are_the_same(folder: Path) -> None:
    store = open_store(folder, direct=False)
    put(store, *range(20))
    assert not store.is_direct
    assert held(store, range(20)) == list(range(20))
    store.close()
    again = open_store(folder)
    assert held(again, range(20)) == list(range(20))
    again.close()


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_that_come_together_are_written_together(
    direct: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, as far as a segment has room; sizes of no whole pages among them, and one name twice."""
    calls: list[int] = []
    write = segments.write_at

    def count(descriptor: int, buffers: list[memoryview], offset: int) -> None:
        calls.append(sum(len(buffer) for buffer in buffers))
        write(descriptor, buffers, offset)

    store = open_store(folder, direct=direct)
    put(store, 1)
    monkeypatch.setattr(segments, "write_at", count)
    sizes = {number: SIZE - number % 3 * 4097 for number in range(1, 60)}
    blocks = {number: block(number, size if number > 1 else SIZE) for number, size in sizes.items()}
    aligned = page_buffer(4 * PAGE)
    aligned[:] = block(60, len(aligned))
    records = [Record(name(number), REALM, memoryview(data)) for number, data in blocks.items()]
    records += [Record(name(60), REALM, aligned), records[7]]
    assert store.put_all(records) == 59
    assert len(calls) < 8  # a segment takes a dozen and more, and its own beginning is a call
    store.close()
    again = open_store(folder, direct=direct)
    blocks[60] = bytes(aligned)
    for number, data in blocks.items():
        read = again.read(name(number))
        assert read is not None
        assert bytes(read.payload) == data
    assert again.corrupt == 0
    again.close()


def test_of_blocks_that_come_together_those_before_a_failure_stay(
    store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    write = segments.write_at

    def fail_third(descriptor: int, buffers: list[memoryview], offset: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.EIO, "no")
        write(descriptor, buffers, offset)

    put(store, 0)
    monkeypatch.setattr(segments, "write_at", fail_third)
    with pytest.raises(StoreError, match="could not be stored"):
        store.put_all([Record(name(number), REALM, memoryview(block(number))) for number in range(1, 100)])
    there = held(store, range(100))
    assert there == list(range(len(there)))
    assert 1 < len(there) < 100
    assert store.put_all([Record(name(number), REALM, memoryview(block(number))) for number in range(100)]) > 0
    store.close()
    again = open_store(folder)
    assert held(again, range(100)) == list(range(100))
    again.close()


def test_a_block_that_came_long_ago_is_committed_sooner(folder: Path) -> None:
    """So that one which was appended late is not late twice."""
    store = open_store(folder, commit_seconds=30)
    came = time.monotonic() - 29.9
    store.put_all([Record(name(1), REALM, memoryview(block(1)), came=came)])
    until = time.monotonic() + 10
    while len(store.index) == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(store.index) == 1
    (delay,) = store.take_delays()
    assert 29.9 <= delay < 40
    assert store.take_delays() == []
    store.close()


def test_commits_come_by_themselves(folder: Path) -> None:
    store = open_store(folder, commit_seconds=0.05)
    put(store, 1)
    until = time.monotonic() + 60
    while len(store.index) == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.index.get(name(1)) is not None
    store.close()


def test_the_quota_holds_and_what_is_used_stays(store: DurableStore, folder: Path) -> None:
    for number in range(800):
        put(store, number)
        assert store.read(name(0)) is not None
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "lock.mdb")
        assert size <= QUOTA
    assert store.evicted > 300
    there = held(store, range(800))
    assert there[0] == 0
    assert there[-50:] == list(range(750, 800))  # the newest are there, but for what was in use


def test_a_smaller_quota_is_kept_after_a_restart(store: DurableStore, folder: Path) -> None:
    put(store, *range(150))
    store.close()
    smaller = open_store(folder, quota=5 * 2**20)
    put(smaller, 200)
    assert smaller.bytes_on_disk() <= 2**20
    assert 200 in held(smaller, range(201))
    smaller.close()


def test_an_index_is_whole_whatever_was_done_to_it(store: DurableStore) -> None:
    put(store, *range(300))  # evicts
    for number in range(300):
        store.touch(name(number))
    store.commit()
    store.discard(name(299), "a test")
    put(store, 299)
    store.commit()
    store.describe_realm(REALM, {"a": "model"})
    assert store.forget_realm(REALM, older_than=0.0) == 0
    assert store.forget_realm(REALM) > 100
    store.shrink(2**20)
    put(store, *range(20))
    store.commit()
    assert len(store.index) == 20
    assert store.index.is_whole()


def test_a_new_segment_outlives_the_notes_of_uses(
    store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is read, and that is made durable, after a segment was begun and before a block is in it."""
    put(store, 0)

    def use_one() -> None:
        store.touch(name(0))
        store._commit()

    monkeypatch.setattr(store, "_empty_coldest", use_one)
    number = 0
    while len(store._sizes) < 16:  # so many that one is to be emptied
        number += 1
        put(store, number)
    assert (newest := name(number)) in store
    store.abandon()
    store.index.close()
    again = open_store(folder)
    assert newest in again
    again.close()


def test_one_process_writes(store: DurableStore, folder: Path) -> None:
    with pytest.raises(StoreBusyError):
        open_store(folder)
    put(store, 1)


READER = """
import sys, time
from pathlib import Path
from npu_kvconnector.tiers.durable.index import decode_entry, encode_entry
from npu_kvconnector.tiers.durable.reader import StoreReader
reader = StoreReader(Path(sys.argv[1]))
for line in sys.stdin:
    reader.follow()
    read = reader.read(bytes.fromhex(line))
    print("none" if read is None else bytes(read.payload).hex(), flush=True)
"""


def test_another_process_reads_what_is_durable(store: DurableStore, folder: Path) -> None:
    put(store, 1)
    store.commit()
    command = [sys.executable, "-c", READER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask(number: int) -> str:
            print(name(number).hex(), file=reader.stdin, flush=True)
            return reader.stdout.readline().strip()

        assert ask(1) == block(1).hex()
        assert ask(2) == "none"
        put(store, 2)
        store.commit()
        assert ask(2) == block(2).hex()
        put(store, *range(3, 600))  # what it has read is dropped
        assert ask(1) in {"none", block(1).hex()}
        store.close()
        again = open_store(folder)  # with a new index
        put(again, 1000)
        again.commit()
        assert ask(1000) == block(1000).hex()
        again.close()
        reader.stdin.close()
        assert reader.wait(60) == 0


def test_forgotten_blocks_are_gone(store: DurableStore, folder: Path) -> None:
    put(store, *range(10))
    assert store.forget_realm(REALM) == 10
    assert held(store, range(10)) == []
    assert store.shrink(0) > 0
    assert not list((folder / "segments").glob("*.seg"))


class Model(RuleBasedStateMachine):
    """A store beside a dict: it may forget, but never tell anything else; what was committed survives a restart."""

    @initialize()
    def make(self) -> None:
        import tempfile
        from pathlib import Path

        self.place = tempfile.TemporaryDirectory(prefix="npu-kv-")
        self.folder = Path(self.place.name) / "store"
        self.store = open_store(self.folder)
        self.stored: dict[int, bytes] = {}
        self.durable: set[int] = set()

    @rule(number=st.integers(0, 400), size=st.sampled_from([0, 1, PAGE, SIZE]))
    def put(self, number: int, size: int) -> None:
        data = self.stored.setdefault(number, block(number, size))
        self.store.put(name(number), REALM, memoryview(data))
        assert name(number) in self.store

    @rule(start=st.integers(0, 300))
    def put_many(self, start: int) -> None:
        for number in range(start, start + 60):
            self.put(number, SIZE)

    @rule(number=st.integers(0, 400))
    def get(self, number: int) -> None:
        read = self.store.read(name(number))
        assert read is None or bytes(read.payload) == self.stored[number]

    @rule(number=st.integers(0, 400))
    def touch(self, number: int) -> None:
        self.store.touch(name(number))

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.durable = {number for number in self.stored if name(number) in self.store}

    @rule(number=st.integers(0, 400))
    def discard(self, number: int) -> None:
        self.store.discard(name(number), "a test")
        assert name(number) not in self.store
        self.durable.discard(number)

    @rule(is_clean=st.booleans())
    def restart(self, is_clean: bool) -> None:
        evicted = self.store.evicted
        before = {number for number in self.durable if name(number) in self.store}
        if is_clean:
            self.store.close()
        else:
            self.store.abandon()
            self.store.index.close()
        self.store = open_store(self.folder)
        missing = [number for number in before if name(number) not in self.store]
        assert not missing, (missing, evicted)

    @invariant()
    def within_the_quota(self) -> None:
        if hasattr(self, "store"):
            assert self.store.bytes_on_disk() + 4 * 2**20 <= QUOTA

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.place.cleanup()


Model.TestCase.settings = settings(max_examples=6, stateful_step_count=20, deadline=None)
TestModel = Model.TestCase
