"""A store of blocks: kept through restarts, within its quota, and never wrong whatever happens to its files."""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.durable import files, segments
from npu_kvconnector.tiers.durable.files import PAGE, is_aligned, page_buffer
from npu_kvconnector.tiers.durable.index import decode_entry, encode_entry
from npu_kvconnector.tiers.durable.reader import StoreReader
from npu_kvconnector.tiers.durable.recovery import newest_index
from npu_kvconnector.tiers.durable.store import DurableStore, Record, StoreBusyError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REALM = b"a realm of blocks"[:16]
SIZE = 20_000
QUOTA = 12 * 2**20


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def open_store(folder: Path, **options: object) -> DurableStore:
    return DurableStore(folder, **{"quota": QUOTA, "block_bytes": SIZE, "commit_seconds": 0} | options)  # type: ignore[arg-type]


def put(store: DurableStore, *numbers: int) -> None:
    for number in numbers:
        store.put(name(number), REALM, memoryview(block(number)))


def held(store: StoreReader, numbers: range) -> list[int]:
    """Return the numbers of the blocks there are; each must be what was stored."""
    found = []
    for number in numbers:
        read = store.read(name(number))
        if read is not None:
            assert bytes(read.payload) == block(number)
            found.append(number)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DurableStore]:
    opened = open_store(folder)
    yield opened
    opened.close()


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


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "store")
        put(store, 1)
        store.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_a_folder_with_other_files_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(OptionError, match="other files"):
        open_store(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_other_files_in_a_store_are_left_alone(store: DurableStore, folder: Path) -> None:
    store.close()
    for path in (folder / "notes.txt", folder / "segments" / "notes.seg", folder / "index-of-notes"):
        path.write_text("notes")
    again = open_store(folder)
    put(again, *range(600))
    again.close()
    assert [path.read_text() for path in folder.rglob("*note*")] == ["notes"] * 3


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: folder.write_text("a file"), "cannot be used"),
        (lambda folder: (folder.mkdir(), (folder / "store.json").write_text("{}")), "holds no store"),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "store.json").write_text('{"format": 9, "id": "%s"}' % ("0" * 32)),
            ),
            "format 9, this version reads 1: update npu-kvconnector",
        ),
        (
            lambda folder: (folder.parent / "real").mkdir() or folder.symlink_to(folder.parent / "nowhere"),
            "cannot be used",
        ),
    ],
)
def test_what_is_no_store_is_refused(spoil: Callable[[Path], object], match: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises((OptionError, StoreError), match=match):
        open_store(folder)


@pytest.mark.parametrize(
    ("number", "kind", "way_out"),
    [(errno.ENOSPC, StoreFullError, "make room on that disk"), (errno.EROFS, OptionError, "write there")],
)
def test_what_the_system_says_comes_with_a_way_out(
    number: int, kind: type[Exception], way_out: str, store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("npu_kvconnector.tiers.durable.store.SegmentWriter", fail)
    with pytest.raises(StoreError, match=way_out):
        put(store, 1)
    monkeypatch.setattr("npu_kvconnector.tiers.durable.store.write_whole", fail)
    with pytest.raises(StoreError, match=way_out):
        open_store(folder.with_name("other"))
    monkeypatch.setattr("npu_kvconnector.tiers.durable.store.open_file", fail)
    with pytest.raises(kind, match=f"path=.*{way_out}"):
        open_store(folder.with_name("third"))


def test_too_small_a_quota_says_how_much_is_needed(folder: Path) -> None:
    with pytest.raises(OptionError, match="give the tier at least"):
        open_store(folder, quota=5 * 2**20, block_bytes=2**20)
    assert not folder.exists()


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
