"""Reading files of lines: one line at a time, so that a file of any size needs constant memory.

An unterminated tail is no line (see jsonl.py, Note [Whole lines]). A line that cannot be read is given as the error
that says why, and the lines behind it are read.
"""

from __future__ import annotations

import gzip
import os
import zlib
from typing import IO, TYPE_CHECKING, cast

from npu_statlogger.errors import FormatError
from npu_statlogger.lines import Line, decode
from npu_statlogger.rotation import rotated_files
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["files_of", "is_packed", "read_lines", "read_snapshots"]

_GZIP = b"\x1f\x8b"


def read_lines(path: Path) -> Iterator[Line | FormatError]:
    """Yield each whole line of a file, plain or gzip, or the error for one that is damaged or foreign.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with _open(path) as file:
        try:
            for text in file:
                if not text.endswith(b"\n"):
                    return
                yield _line(text)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            yield FormatError(f"the rest of the file is damaged: {error}.")


def read_snapshots(path: Path) -> Iterator[Snapshot | FormatError]:
    """Do as `read_lines`, for interval lines alone."""
    return (line for line in read_lines(path) if isinstance(line, Snapshot | FormatError))


def files_of(path: Path) -> list[Path]:
    """Return the files that were set aside from `path`, oldest first, and `path` itself last; those that exist."""
    return [*rotated_files(path), *([path] if path.exists() else [])]


def is_packed(fd: int) -> bool:
    """Tell whether an open file is gzip."""
    return os.pread(fd, len(_GZIP), 0) == _GZIP


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = is_packed(file.fileno())
    return cast(IO[bytes], gzip.open(path) if packed else path.open("rb"))


def _line(text: bytes) -> Line | FormatError:
    try:
        return decode(text)
    except FormatError as error:
        return error
