"""The file: appending lines so that each is whole or absent.

Note [Whole lines]. A line ends with a newline; bytes behind the last newline are not a line. Each append happens in
one write under an exclusive flock, which the kernel releases when its holder dies. Whoever holds the lock is the only
writer, so an unterminated tail that begins as our lines do stems from a writer that was killed inside the write: the
next append cuts it off. A write that the disk refuses half-way is cut off at once. Readers skip an unterminated tail.

Note [Files of others]. Only files that begin with a line of ours, or are empty, are written to, and only tails of ours
are cut off: a tail that somebody else wrote is ended by a newline, and readers report it as a damaged line.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import ConfigError
from npu_statlogger.snapshot import SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LineWriter"]

_BLOCK = 1 << 16
_BEGIN = f'{{"schema":"{SCHEMA.partition("/")[0]}/'.encode()
"""How each of our lines begins, of whatever version of the schema."""


class LineWriter:
    """Appends JSON lines to a file that other processes may append to as well."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`, readable by its owner only.

        Raises:
            ConfigError: `path` is not a regular file (a pipe could block the server's exit), or holds something else
                than our lines.
            OSError: the directory is missing or the file cannot be written.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _refuse_others(self._fd, path)
        except ConfigError:
            self.close()
            raise

    def append(self, *lines: dict[str, Any]) -> None:
        """Write lines, whose first key is "schema".

        Raises:
            OSError: they could not be written in full; the file then holds nothing of them.
        """
        text = b"".join(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n" for line in lines)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            end = _cut_torn_line(self._fd)
            if end and os.pread(self._fd, 1, end - 1) != b"\n":
                text = b"\n" + text
            written = 0
            try:
                while written < len(text):
                    written += os.write(self._fd, text[written:])
            except OSError:
                os.ftruncate(self._fd, end)
                raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _refuse_others(fd: int, path: Path) -> None:
    """Raise ConfigError unless this is a regular file that is empty or begins with a line of ours."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        msg = f"statistics go to a regular file; {path} is none."
        raise ConfigError(msg)
    if os.pread(fd, len(_BEGIN), 0) not in (b"", _BEGIN):
        msg = f"statistics go to a new file or one of npu-statlogger's; {path} holds something else: name another."
        raise ConfigError(msg)


def _cut_torn_line(fd: int) -> int:
    """Cut off what a killed writer of ours left behind the last newline, and return the file's size then."""
    size = os.fstat(fd).st_size
    end = _end_of_last_line(fd, size)
    tail = os.pread(fd, len(_BEGIN), end)
    if end < size and _BEGIN.startswith(tail):
        os.ftruncate(fd, end)
        return end
    return size


def _end_of_last_line(fd: int, size: int) -> int:
    """Return the offset behind the last newline of the file, 0 if there is none."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        # The usual case, a file that ends with a newline, needs its last byte only.
        if os.pread(fd, 1, end - 1) == b"\n":
            return end
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
