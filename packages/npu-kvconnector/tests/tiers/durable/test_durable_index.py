"""The index of a store: readers beside its writer, and disks without room for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from npu_kvconnector.tiers.durable import probe
from npu_kvconnector.tiers.durable.index import Batch, Entry, Index
from npu_kvconnector.tiers.durable.recovery import newest_index
from npu_kvconnector.tiers.durable.segments import Place
from tests.support.durable_store import REALM, name, open_store, put

if TYPE_CHECKING:
    from pathlib import Path

    from npu_kvconnector.tiers.durable.store import DurableStore

MIB = 2**20
READER = """
import sys
from pathlib import Path
from npu_kvconnector.tiers.durable.index import Index
index = Index(Path(sys.argv[1]), readonly=True)
print(len(index), flush=True)
sys.stdin.readline()
print(len(index), index.get(bytes.fromhex(sys.argv[2])) is not None)
"""


def entries(*numbers: int) -> dict[bytes, Entry]:
    """Return entries in places of their own."""
    return {name(each): Entry(Place(1, 4096 * each, 100), 100, 0, REALM, 0.0, each, each) for each in numbers}


def test_a_reader_finds_what_the_index_grows_by(tmp_path: Path) -> None:
    """Far beyond what it took when the reader opened it."""
    writer = Index(tmp_path / "index", map_size=16 * MIB)
    command = [sys.executable, "-c", READER, str(tmp_path / "index"), name(24_999).hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "0\n"
        writer.commit(Batch(puts=entries(*range(25_000))))
        assert (tmp_path / "index" / "data.mdb").stat().st_size > 4 * MIB
        assert reader.communicate("\n", timeout=60)[0] == "25000 True\n"
    writer.close()


def test_the_lock_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """LMDB writes to it as to memory: a hole that the disk has no room for would end the process."""
    for folder in (tmp_path / "new", tmp_path / "of-before"):
        folder.mkdir()
        if folder.name == "of-before":  # as LMDB makes it, of holes
            (folder / "lock.mdb").touch()
            os.truncate(folder / "lock.mdb", 32_960)
        Index(folder, map_size=4 * MIB).close()
        found = (folder / "lock.mdb").stat()
        assert found.st_blocks * 512 >= found.st_size >= 512 * 64


def test_a_disk_without_room_for_the_lock_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    index = Index(old, map_size=4 * MIB)
    index.commit(Batch(puts=entries(1), segments={1: 8192}))
    index.close()
    keep = os.posix_fallocate

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert probe.main([str(old), str(new), str(4 * MIB)]) == probe._FULL
    with pytest.raises(OSError, match="No space left"):
        Index(new, map_size=4 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", keep)
    assert probe.main([str(old), str(new), str(4 * MIB)]) == 0
    (old / "data.mdb").write_bytes(b"damaged" * 10_000)
    assert probe.main([str(old)]) == probe._NOT_WHOLE


SHORT = """
import resource, sys
from pathlib import Path
from npu_kvconnector.errors import StoreError
from tests.support.durable_store import open_store
resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))  # less than the index
try:
    open_store(Path(sys.argv[1]))
except StoreError as error:
    print(error)
"""


def test_an_index_that_cannot_be_written_again_stays(store: DurableStore, folder: Path) -> None:
    """What was forgotten does not come back, as it would where the index were made from the blocks."""
    put(store, *range(300))
    assert store.forget_realm(REALM) > 200
    put(store, 1000)
    store.describe_realm(REALM, {"a": "model" * 20_000})
    store.close()
    before = newest_index(folder)
    done = subprocess.run([sys.executable, "-c", SHORT, str(folder)], capture_output=True, text=True, check=True)
    assert "cannot be opened" in done.stdout
    assert newest_index(folder) == before
    again = open_store(folder)
    assert not again.recovered.was_rebuilt
    assert len(again.index) == 1
    again.close()
