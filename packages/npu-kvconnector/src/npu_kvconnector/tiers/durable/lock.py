"""Who writes a store: the one process that holds its lock. The others read it."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from npu_kvconnector.errors import OptionError, StoreError
from npu_kvconnector.tiers.durable.disk_errors import is_full, way_out
from npu_kvconnector.tiers.durable.files import make_folder, open_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StoreBusyError", "StoreFullError", "lock_store"]


class StoreFullError(StoreError):
    """The disk has no room, which it may have again: others fill it, too."""


class StoreBusyError(StoreError):
    """Another process writes the store."""


def lock_store(folder: Path) -> int:
    """Make the folder a store where it is empty, take the writer's lock, and return what holds it.

    Raises:
        OptionError: the folder holds something else, or cannot be used.
        StoreBusyError: another process has the lock.
    """
    try:
        make_folder(folder)
        if not (folder / "store.json").exists():
            strangers = [path.name for path in folder.iterdir() if path.name not in {"lock", "segments"}]
            strangers = [name for name in strangers if not name.startswith((".store.json-", "lost+found"))]
            if strangers:
                msg = f"path={folder} holds other files ({', '.join(sorted(strangers)[:3])}): name an empty folder"
                raise OptionError(msg)
        descriptor = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        hint = way_out(error) or "; name a folder that this user may write"
        msg = f"path={folder} cannot be used: {error.strerror or error}{hint}"
        raise (StoreFullError if is_full(error) else OptionError)(msg) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        msg = f"another process writes the store in {folder}"
        raise StoreBusyError(msg) from error
    return descriptor
