"""Proves that an index can be read, in a process of its own: python -m npu_kvconnector.tiers.durable.probe OLD [NEW].

LMDB follows the pointers in its file unchecked, so a damaged file can end the process that reads it. That must not be
the engine. Here each entry is read and checked, and what is whole is written to a new index (NEW), of which no page
comes from the old file. Exit code 0: done, and a line of JSON says how many entries there were; else: unreadable.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from npu_kvconnector.tiers.durable.index import Batch, Index

__all__ = ["is_readable", "main", "rewrite"]

_LONGEST = 600  # seconds
_NOT_WHOLE = 3


def rewrite(old: Path, new: Path, map_size: int) -> bool:
    """Write one index to another, made by this; return whether the old one could be read and was whole."""
    return _run(str(old), str(new), str(map_size))


def is_readable(folder: Path) -> bool:
    """Return whether an index can be read from end to end."""
    return _run(str(folder))


def _run(*arguments: str) -> bool:
    command = [sys.executable, "-m", "npu_kvconnector.tiers.durable.probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LONGEST, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    """Read one index and, where two are named, write the other."""
    old = Index(Path(arguments[0]), readonly=True)
    segments = old.segments()
    entries = {name: entry for name, entry in old.entries() if entry.place.segment in segments}
    batch = Batch(puts=entries, segments=segments, realms=old.realms(), meta=old.meta(), marks=old.marks())
    if len(arguments) > 1:
        if not old.is_whole():
            return _NOT_WHOLE
        new = Index(Path(arguments[1]), map_size=int(arguments[2]))
        new.commit(batch)
        new.close()
    sys.stdout.write(json.dumps({"entries": len(entries), "marks": len(batch.marks)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
