"""Setting files aside: when, under which name, compressed, and how many stay.

Note [Rotation]. A file is renamed under the flock that its writers write under, to its name and the time in UTC.
Writers compare, once they hold the lock, the file they have open with the one that has the name, and open that one if
they differ: nobody writes to a file that was set aside, and whoever else rotates (logrotate) is followed in the same
way. A compressed file appears under its name when it is whole; until then the plain one counts.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import glob
import gzip
import json
import logging
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Rotation", "rotated_files", "rotated_name"]

logger = logging.getLogger("vllm.npu_statlogger")

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_PART = ".part"


@dataclass(frozen=True)
class Rotation:
    """When a file is set aside, and what becomes of it; 0 switches a limit off."""

    size: float = 0.0
    """Bytes."""

    seconds: float = 0.0
    """Length of a period; periods are counted from the epoch, so that 86,400 ends at midnight UTC."""

    keep: int = 0
    compress: bool = True

    def due(self, fd: int, now: float) -> bool:
        """Tell whether an open file of lines is to be set aside; an empty one never is."""
        size = os.fstat(fd).st_size
        if not size:
            return False
        if self.size and size >= self.size:
            return True
        begun = _begun(fd) if self.seconds else None
        return begun is not None and now // self.seconds > begun // self.seconds

    def tidy(self, path: Path) -> None:
        """Compress what was set aside and remove the oldest beyond `keep`; what fails is left for the next time."""
        try:
            if self.compress:
                for plain in _all_rotated(path):
                    if plain.suffix != ".gz":
                        _compress(plain)
            if self.keep:
                for old in rotated_files(path)[: -self.keep]:
                    old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("A file of statistics that was set aside could not be tidied up (%s); it stays.", error)


def rotated_name(path: Path, now: float) -> Path:
    """Return a name that no file has; to be called under the lock."""
    while True:
        stamp = dt.datetime.fromtimestamp(now, dt.UTC).strftime(_STAMP)
        name = path.with_name(f"{path.name}.{stamp}")
        if not (name.exists() or _packed(name).exists()):
            return name
        now += 1e-6


def rotated_files(path: Path) -> list[Path]:
    """Return the files that were set aside from `path`, oldest first."""
    return [each for each in _all_rotated(path) if each.suffix == ".gz" or not _packed(each).exists()]


def _all_rotated(path: Path) -> list[Path]:
    there = path.parent.glob(f"{glob.escape(path.name)}.*")
    return sorted(each for each in there if _is_stamp(each.name[len(path.name) + 1 :]))


def _is_stamp(ending: str) -> bool:
    try:
        dt.datetime.strptime(ending.removesuffix(".gz"), _STAMP).replace(tzinfo=dt.UTC)
    except ValueError:
        return False
    return True


def _packed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _compress(plain: Path) -> None:
    """Replace a file by its compressed self, which appears when it is whole and on the disk."""
    part = plain.with_name(plain.name + _PART)
    # Of several processes, one compresses a file: the one that holds its lock.
    with suppress(FileNotFoundError, BlockingIOError), plain.open("rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _packed(plain).exists() or not plain.exists():
            plain.unlink(missing_ok=True)
            return
        with part.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            with gzip.GzipFile(fileobj=target, mode="wb") as packed:
                shutil.copyfileobj(source, packed)
            target.flush()
            os.fsync(target.fileno())
        part.rename(_packed(plain))
        plain.unlink()


def _begun(fd: int) -> float | None:
    """Return when a file's first line was written, in seconds since the epoch; None if it does not say."""
    head = os.pread(fd, 1 << 16, 0).partition(b"\n")[0]
    try:
        line = json.loads(head)
        return float(line.get("time", line.get("start")))
    except (AttributeError, TypeError, ValueError):
        return None
