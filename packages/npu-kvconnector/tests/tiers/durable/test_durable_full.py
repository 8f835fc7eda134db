"""A store on a disk that others fill, and an index that cannot be written: smaller or ended, never larger."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from npu_kvconnector.errors import StoreError
from npu_kvconnector.tiers.durable.index import Batch, Index
from npu_kvconnector.tiers.durable.store import Record
from tests.support.durable_store import QUOTA, REALM, held, name, open_store, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from npu_kvconnector.tiers.durable.store import DurableStore

FULL, BROKEN = lmdb.DiskError("no space left on device"), lmdb.Error("input/output error")


def fail_commits(monkeypatch: pytest.MonkeyPatch, error: Exception, when: Callable[[Batch, int], bool]) -> list[Batch]:
    """Let commits of the index fail, said by what they are to change and how many have failed; return those."""
    commit, failed = Index.commit, list[Batch]()

    def fail(index: Index, batch: Batch) -> Any:
        if when(batch, len(failed)):
            failed.append(batch)
            raise error
        return commit(index, batch)

    monkeypatch.setattr(Index, "commit", fail)
    return failed


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "segments").iterdir())


def fill(store: DurableStore) -> int:
    """Store until blocks go; return how many there were."""
    number = 0
    while not store.evicted:
        put(store, number)
        number += 1
    store.commit()
    return number


@pytest.mark.parametrize("what", ["puts", "drops"])
def test_a_full_disk_makes_the_store_smaller(
    what: str, store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = fill(store)
    evicted = store.evicted
    failed = fail_commits(
        monkeypatch, FULL, lambda batch, times: times < 2 and bool(batch.puts if what == "puts" else batch.dropped)
    )
    put(store, *range(number, number + 60))
    store.commit()
    assert len(failed) == 2
    assert store.failure is None
    assert store.lost == 0
    assert store.evicted > evicted
    assert store.segment_bytes_on_disk == bytes_of(folder)
    assert set(held(store, range(number, number + 60))) == set(range(number, number + 60))
    store.close()
    again = open_store(folder)
    assert not again.recovered.was_rebuilt
    assert set(held(again, range(number + 60))) >= set(range(number, number + 60))
    again.close()


def test_a_segment_that_cannot_be_dropped_still_counts(
    store: DurableStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = fill(store)
    fail_commits(monkeypatch, BROKEN, lambda batch, _: bool(batch.dropped))
    for more in range(200):
        try:
            put(store, number + more)
        except StoreError:
            break
    assert store.failure is not None
    assert store.segment_bytes_on_disk == bytes_of(folder) <= QUOTA


def test_small_blocks_do_not_fill_the_index(folder: Path) -> None:
    """Of which a disk holds more than the index was sized for."""
    store = open_store(folder, quota=96 * 2**20, block_bytes=65_536)
    chance = random.Random(0)
    for _ in range(30):
        store.put_all([Record(chance.randbytes(32), REALM, memoryview(b"a small block")) for _ in range(500)])
    store.commit()
    assert store.failure is None
    assert store.index.fill() < 0.4
    store.close()


def test_segments_without_blocks_are_given_back(store: DurableStore, folder: Path) -> None:
    put(store, *range(100))
    store.put(name(100), bytes(16), memoryview(b"another realm's"))
    store.commit()
    before = store.bytes_on_disk()
    assert store.forget_realm(REALM) == 100
    assert store.shrink(before) > before // 2
    assert bytes_of(folder) == store.bytes_on_disk()
    assert name(100) in store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "npu-kv", str(place)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk of its own can be mounted by root alone: {error}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


START = """
import sys
from pathlib import Path
from npu_kvconnector.errors import StoreError
from tests.support.durable_store import open_store
try:
    store = open_store(Path(sys.argv[1]))
    print("open", store.recovered.was_rebuilt, len(store.index))
    store.close()
except StoreError as error:
    print(type(error).__name__)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("left", [0, 8, 40, 96, 200])
def test_a_start_on_a_full_disk_ends_nothing_and_damages_nothing(left: int, small_disk: Path) -> None:
    """With so many KiB left; the start is a process of its own, which a signal might end."""
    folder = small_disk / "store"

    def start() -> str:
        command = [sys.executable, "-c", START, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.strip()

    store = open_store(folder)
    put(store, *range(200))
    store.forget_realm(REALM)
    store.put(name(1000), bytes(16), memoryview(b"another realm's"))
    store.close()
    others = small_disk / "others"
    room = shutil.disk_usage(small_disk).free - left * 1024
    with others.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)
    assert start() in {"StoreFullError", "open False 1"}
    others.unlink()
    assert start() == "open False 1"
