"""What an error of a disk means: whether the disk is full, and what somebody can do about it."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import lmdb

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_full", "way_out"]


_NEARLY_FULL = 2**20  # bytes


def is_full(error: Exception, folder: Path | None = None) -> bool:
    """Say whether the disk, or this user's part of it, has no room.

    LMDB has an error of its own for that, but calls it an error of the disk where the first of its pages had room; what
    is left on the disk of a folder tells.
    """
    if isinstance(error, lmdb.DiskError) or getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT}:
        return True
    return folder is not None and isinstance(error, lmdb.Error) and shutil.disk_usage(folder).free < _NEARLY_FULL


def way_out(error: Exception) -> str:
    """Return what to do about an error of the system, to be said behind it."""
    number = error.errno if isinstance(error, OSError) else None
    if is_full(error):
        return "; make room on that disk, or name a path on another one"
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "; let the user of the server write there, or name another path"
    return ""
