"""Proves that an index can be read, in a process of its own: python -m npu_kvconnector.tiers.durable.probe OLD [NEW].

LMDB follows the pointers in its file unchecked, so a damaged file can end the process that reads it. That must not be
the engine. Here each entry is read and checked, and what is whole is written to a new index (NEW), of which no page
comes from the old file. Exit code 0: done, and a line of JSON says how many entries there were; 3, or a signal: the old
one is damaged; 4: the disk has no room, and 5: it fails, which says nothing of the old one.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import lmdb

from npu_kvconnector.tiers.durable.disk_errors import is_full
from npu_kvconnector.tiers.durable.index import Batch, Index

__all__ = ["is_readable", "main", "rewrite"]

_LONGEST = 600  # seconds
_NOT_WHOLE, _FULL, _FAILED = 3, 4, 5


def rewrite(old: Path, new: Path, map_size: int) -> bool:
    """Write one index to another, made by this; return whether the old one could be read and was whole.

    Raises:
        OSError: the new one could not be written, so that this is not known.
    """
    return _is_done(_run(str(old), str(new), str(map_size)))


def is_readable(folder: Path) -> bool:
    """Return whether an index can be read from end to end.

    Raises:
        OSError: the disk has no room for a reader, so that this is not known.
    """
    return _is_done(_run(str(folder)))


def _is_done(code: int) -> bool:
    if code == _FULL:
        raise OSError(errno.ENOSPC, "the disk has no room for the index")
    if code == _FAILED:
        raise OSError(errno.EIO, "the index could not be written again")
    return code == 0


def _run(*arguments: str) -> int:
    """Return the exit code of the probe; what takes too long is damaged: its pages may point to each other for ever.

    Raises:
        OSError: it cannot be started.
    """
    command = [sys.executable, "-m", "npu_kvconnector.tiers.durable.probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LONGEST, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return _NOT_WHOLE
    return done.returncode


def main(arguments: list[str]) -> int:
    """Read one index and, where two are named, write the other."""
    try:
        old = Index(Path(arguments[0]), readonly=True)
        segments = old.segments()
        entries = {name: entry for name, entry in old.entries() if entry.place.segment in segments}
        batch = Batch(puts=entries, segments=segments, realms=old.realms(), meta=old.meta(), marks=old.marks())
        is_whole = len(arguments) == 1 or old.is_whole()
    except Exception as error:  # noqa: BLE001  # whatever is damaged
        if isinstance(error, OSError) or is_full(error):
            return _FULL if is_full(error) else _FAILED
        return _NOT_WHOLE
    if not is_whole:
        return _NOT_WHOLE
    if len(arguments) > 1:
        try:
            new = Index(Path(arguments[1]), map_size=int(arguments[2]))
            new.commit(batch)
            new.close()
        except (OSError, lmdb.Error) as error:
            return _FULL if is_full(error, Path(arguments[1]).parent) else _FAILED
    sys.stdout.write(json.dumps({"entries": len(entries), "marks": len(batch.marks)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
