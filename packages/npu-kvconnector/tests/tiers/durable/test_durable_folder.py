"""The folder of a store: private, left alone where it is another's, and refused with the way out."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.durable.lock import StoreFullError
from npu_kvconnector.tiers.durable.store import DurableStore
from tests.support.durable_store import open_store, put

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
    monkeypatch.setattr("npu_kvconnector.tiers.durable.lock.open_file", fail)
    with pytest.raises(kind, match=f"path=.*{way_out}"):
        open_store(folder.with_name("third"))


def test_too_small_a_quota_says_how_much_is_needed(folder: Path) -> None:
    with pytest.raises(OptionError, match="give the tier at least"):
        open_store(folder, quota=5 * 2**20, block_bytes=2**20)
    assert not folder.exists()
