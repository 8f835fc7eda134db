"""The file: appending lines so that each is whole or absent.

Note [Whole lines]. A line ends with a newline; bytes behind the last newline are not a line. Each append happens in
one write under an exclusive flock, which the kernel releases when its holder dies. Whoever holds the lock is the only
writer, so an unterminated tail that begins as our lines do stems from a writer that was killed inside the write: the
next append cuts it off. A write that the disk refuses half-way is cut off at once. Readers skip an unterminated tail.

Note [Files of others]. Only files that begin with a line of ours, or are empty, are written to, and only tails of ours
are cut off: a tail that somebody else wrote is ended by a newline, and readers report it as a damaged line. A file that
is nothing but a piece of our beginning is ours from half of that on; less, such as a brace, might be anybody's.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from typing import TYPE_CHECKING

from npu_statlogger.errors import ConfigError
from npu_statlogger.rotation import Rotation, rotated_name
from npu_statlogger.snapshot import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from npu_statlogger.lines import Line

__all__ = ["LineWriter", "encode"]

_BLOCK = 1 << 16
_BEGIN = f'{{"schema":"{SCHEMA.partition("/")[0]}/'.encode()
"""How each of our lines begins, of whatever version of the schema."""


class LineWriter:
    """Appends lines to a file that other processes may append to as well, and sets it aside when that is due."""

    def __init__(
        self,
        path: Path,
        *,
        rotation: Rotation | None = None,
        first: Callable[[], bytes] | None = None,
        begin: bytes = _BEGIN,
        header: bytes = b"",
    ) -> None:
        """Open or create `path`, readable by its owner only.

        Args:
            path: the file.
            rotation: when it is set aside; never, if None.
            first: makes the line that this writer puts before its own, once in each file; it is asked then, so that
                the line may say when the file was begun.
            begin: how each line begins; what begins otherwise is of somebody else.
            header: line at the head of each file, before any other writer's.

        Raises:
            ConfigError: `path` is not a regular file (a pipe could block the server's exit), or holds something else
                than our lines.
            OSError: the directory is missing or the file cannot be written.
        """
        self._path, self._rotation = path, rotation or Rotation()
        self._first, self._begin, self._header = first, begin, header
        self._fd = -1
        self._end = 0  # behind our last append, 0 before the first; a file that is shorter now was cut by copytruncate
        self._open()

    def append(self, *lines: bytes) -> None:
        """Write lines, each with its newline.

        Raises:
            OSError: they could not be written in full; the file then holds nothing of them.
            ConfigError: somebody else's file has taken the place of ours.
        """
        self._lock()
        try:
            if self._rotation.due(self._fd, time.time()):
                self._path.rename(rotated_name(self._path, time.time()))
                self._lock()  # of the new file; that of the file set aside goes with its descriptor
                rotated = True
            else:
                rotated = False
            self._append(b"".join(lines))
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        if rotated:
            self._rotation.tidy(self._path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> None:
        """Lock the file that has our name now, opening it anew if ours was set aside or removed."""
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if _same_file(self._fd, self._path):
                return
            self._open()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _refuse_others(fd, self._path, (self._begin, self._header) if self._header else (self._begin,))
        except ConfigError:
            os.close(fd)
            raise
        self.close()
        self._fd, self._end = fd, 0

    def _append(self, text: bytes) -> None:
        """Write under the lock: whatever this file still needs before our lines, and these."""
        end = _cut_torn_line(self._fd, self._begin, self._header)
        if self._first is not None and not 0 < self._end <= end:
            text = self._first() + text
        if not end:
            text = self._header + text
        elif os.pread(self._fd, 1, end - 1) != b"\n":
            text = b"\n" + text
        written = 0
        try:
            while written < len(text):
                written += os.write(self._fd, text[written:])
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._end = end + len(text)


def encode(line: Line) -> bytes:
    """Return a line as JSON with its newline.

    Raises:
        TypeError: a value in it is of no type that JSON has.
        ValueError: a number in it is not finite, so that no JSON can say it.
    """
    return json.dumps(line.to_dict(), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _refuse_others(fd: int, path: Path, begins: tuple[bytes, ...]) -> None:
    """Raise ConfigError unless this is a regular file that is empty or begins with a line of ours."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        msg = f"statistics go to a regular file; {path} is none."
        raise ConfigError(msg)
    if not any(os.pread(fd, len(begin), 0) in (b"", begin) or _is_piece(fd, begin) for begin in begins):
        msg = f"statistics go to a new file or one of npu-statlogger's; {path} holds something else: name another."
        raise ConfigError(msg)


def _is_piece(fd: int, begin: bytes) -> bool:
    """Tell whether the file is nothing but a piece of this beginning, of at least half of it."""
    size = os.fstat(fd).st_size
    return len(begin) <= 2 * size < 2 * len(begin) and begin.startswith(os.pread(fd, size, 0))


def _cut_torn_line(fd: int, begin: bytes, header: bytes) -> int:
    """Cut off what a killed writer of ours left behind the last newline, and return the file's size then."""
    size = os.fstat(fd).st_size
    end = _end_of_last_line(fd, size)
    tail = os.pread(fd, len(begin), end)
    if end < size and (begin.startswith(tail) or _is_piece(fd, header)):
        os.ftruncate(fd, end)
        return end
    return size


def _end_of_last_line(fd: int, size: int) -> int:
    """Return the offset behind the last newline of the file, 0 if there is none."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        # The usual case, a file that ends with a newline, needs its last byte only.
        if os.pread(fd, 1, end - 1) == b"\n":
            return end
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
