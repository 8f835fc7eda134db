"""The file: appending a line so that it is whole or absent, and reading what is whole.

Note [Whole lines]. A line ends with a newline; bytes behind the last newline are not a line. Each append happens in
one write under an exclusive flock, which the kernel releases when its holder dies. Whoever holds the lock is the only
writer, so an unterminated tail can only stem from a writer that was killed inside the write: the next append cuts it
off. A write that the disk refuses half-way is cut off at once. Readers skip an unterminated tail.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import ConfigError, FormatError
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["LineWriter", "read_snapshots"]

_BLOCK = 1 << 16


class LineWriter:
    """Appends JSON lines to a file that other processes may append to as well."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`, readable by its owner only.

        Raises:
            ConfigError: `path` is something else than a regular file (a pipe could block the server's exit).
            OSError: the directory is missing or the file cannot be written.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            msg = f"statistics go to a regular file; {path} is none."
            raise ConfigError(msg)

    def append(self, data: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            OSError: it could not be written in full; the file then holds nothing of it.
        """
        line = json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            end = _end_of_last_line(self._fd)
            os.ftruncate(self._fd, end)
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._fd, line[written:])
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


def read_snapshots(path: Path) -> Iterator[Snapshot | FormatError]:
    """Yield each whole line of `path` as a snapshot, or the error for a line that is damaged or foreign."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield Snapshot.from_dict(json.loads(line))
            except (FormatError, ValueError) as error:
                yield error if isinstance(error, FormatError) else FormatError(f"not JSON: {error}.")


def _end_of_last_line(fd: int) -> int:
    """Return the offset behind the last newline of the file, 0 if there is none."""
    end = os.fstat(fd).st_size
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
