"""Files of a store: private, page by page, and past the page cache where the filesystem can do that."""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Buffer

__all__ = [
    "PAGE",
    "is_aligned",
    "make_folder",
    "open_file",
    "page_buffer",
    "read_at",
    "round_up",
    "supports_direct",
    "sync_folder",
    "write_at",
    "write_whole",
]

PAGE = 4096
"""Bytes; records, and memory given to O_DIRECT, begin and end at its multiples."""


def round_up(size: int) -> int:
    """Return the bytes of whole pages that hold ``size`` bytes."""
    return -(-size // PAGE) * PAGE


def page_buffer(size: int) -> memoryview:
    """Return zeroed memory of whole pages that begins at a page."""
    return memoryview(mmap.mmap(-1, max(round_up(size), PAGE)))


def make_folder(path: Path) -> None:
    """Make a folder that its owner alone can enter, where it is not there, whatever the umask."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        with contextlib.suppress(OSError):  # a parent that this user may not read
            sync_folder(path.parent)


def open_file(path: Path, flags: int, *, direct: bool = False) -> int:
    """Return a descriptor; a new file is its owner's alone, and a symbolic link is an error."""
    wanted = flags | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, wanted, 0o600)
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o600)
    return descriptor


def supports_direct(folder: Path) -> bool:
    """Return whether files in the folder can be written past the page cache."""
    path = folder / f".direct-{uuid.uuid4().hex}"
    try:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=True)
    except OSError:
        path.unlink(missing_ok=True)  # some filesystems make the file, then refuse the flag
        return False
    try:
        return os.pwrite(descriptor, page_buffer(PAGE), 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def write_at(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all bytes, going on after a short write.

    Raises:
        OSError: of the system; some of the bytes may have been written.
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        written = os.pwritev(descriptor, left, offset)
        if written <= 0:
            raise OSError(5, "a write made no progress")
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer as far as the file goes, and return the bytes read."""
    done = 0
    while done < len(buffer):
        number = os.preadv(descriptor, [buffer[done:]], offset + done)
        done += number
        if number == 0 or number % PAGE:  # the end; O_DIRECT could not go on from the middle of a page
            break
    return done


def sync_folder(path: Path) -> None:
    """Make names that were made, changed or removed in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file durably, so that there is never a part of it."""
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    descriptor = open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_at(descriptor, [data], 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    new.rename(path)
    sync_folder(path.parent)


def is_aligned(view: memoryview) -> bool:
    """Return whether memory begins and ends at a page, as O_DIRECT needs it."""
    import numpy as np  # here, since the probe of an index starts without it

    array = np.frombuffer(view, dtype=np.uint8)
    return array.ctypes.data % PAGE == 0 and array.nbytes % PAGE == 0
