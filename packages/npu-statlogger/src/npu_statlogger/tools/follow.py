"""Following files that are being written, also when they are rotated or cut.

A poll begins behind the last whole line, not behind the last byte: bytes of a line in progress, or of a writer that was
killed, may be cut off and written anew. A gzip file does not grow; what it holds is followed in a temporary file.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from npu_statlogger.errors import FormatError, InputError
from npu_statlogger.lines import Line, decode
from npu_statlogger.reading import is_packed
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.source import open_error

__all__ = ["Follower", "time_of"]

_BLOCK = 1 << 16
_MOST = 1 << 24
"""Bytes read in one poll."""


class Follower:
    """The lines that are appended to one file."""

    def __init__(self, path: Path) -> None:
        """Open the file and stand at its end.

        Raises:
            InputError: it cannot be opened, is no regular file, or is gzip that there is no room to unpack.
        """
        self.path = path
        self.damaged = 0
        self.packed = False
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise open_error(error) from error
        if not path.is_file():
            msg = f"{path} is no regular file; a file that grows is needed."
            raise InputError(msg)
        if is_packed(self._fd):
            self._unpack()
        self._offset = self._end()

    def back(self, lines: int, wanted: Callable[[Line], bool] | None = None) -> None:
        """Go back by whole lines, of which only those that are `wanted` count, or to the file's start."""
        offset = self._offset
        for begin, text in self._backwards():
            if lines <= 0:
                break
            offset = begin
            lines -= wanted is None or _holds(text, wanted)
        self._offset = offset

    def back_to(self, when: float) -> None:
        """Go back to about the first line that ended after a time, by bisection: lines are in the order of time."""
        low, high = 0, self._offset
        while high - low > _BLOCK:
            middle = (low + high) // 2
            begin = self._behind_newline(middle)
            line = next(self._lines(begin, 1 << 20), None) if begin < high else None
            if line is None or time_of(line) >= when:
                high = middle
            else:
                low = begin
        self._offset = low

    def has_lines(self) -> bool:
        """Tell whether there is a whole line before where we stand."""
        return any(_holds(text, lambda line: True) for _, text in self._backwards())

    def poll(self) -> Iterator[Line]:
        """Yield the lines that came since; damaged ones are counted."""
        while True:
            before = self._offset
            if self._offset > os.fstat(self._fd).st_size:  # cut: what is there now is new
                self._offset = 0
            yield from self._lines(self._offset, _MOST, advance=True)
            if self._offset == before and not self._reopen():
                return

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _unpack(self) -> None:
        """Go over to what a gzip file holds, as far as it is whole."""
        try:
            with tempfile.TemporaryFile() as plain, os.fdopen(self._fd, "rb") as packed:
                try:
                    shutil.copyfileobj(gzip.GzipFile(fileobj=packed), plain)
                except (EOFError, gzip.BadGzipFile, zlib.error):
                    self.damaged += 1
                plain.flush()
                self._fd, self.packed = os.dup(plain.fileno()), True
        except OSError as error:
            msg = f"cannot unpack {self.path}: {error.strerror}."
            raise InputError(msg) from error

    def _reopen(self) -> bool:
        """Go over to the file that has taken this one's name, if it has."""
        if self.packed:
            return False
        try:
            replaced = os.stat(self.path).st_ino != os.fstat(self._fd).st_ino  # noqa: PTH116 # as the one beside it
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if replaced else -1
        except FileNotFoundError:
            return False
        if replaced:
            os.close(self._fd)
            self._fd, self._offset = fd, 0
        return replaced

    def _lines(self, offset: int, limit: int, *, advance: bool = False) -> Iterator[Line]:
        block = os.pread(self._fd, limit, offset)
        end = block.rfind(b"\n") + 1
        if not end and len(block) == limit:  # no line is this long
            end = len(block)
        for text in block[:end].removesuffix(b"\n").split(b"\n") if end else ():
            try:
                line = decode(text)
            except FormatError:
                self.damaged += advance
                continue
            yield line
        if advance:
            self._offset = offset + end

    def _backwards(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines before where we stand, the last first, each with its offset."""
        offset, tail = self._offset - 1, b""  # without the newline that ends the last line
        while offset >= 0:
            begin = max(0, offset - _BLOCK)
            head, *texts = (os.pread(self._fd, offset - begin, begin) + tail).split(b"\n")
            end = begin + len(head) + sum(len(text) + 1 for text in texts)
            for text in reversed(texts):
                yield end - len(text), text
                end -= len(text) + 1
            offset, tail = begin, head
            if not begin:
                yield 0, head
                return

    def _behind_newline(self, offset: int) -> int:
        while block := os.pread(self._fd, _BLOCK, offset):
            if (at := block.find(b"\n")) >= 0:
                return offset + at + 1
            offset += len(block)
        return offset

    def _end(self) -> int:
        """Return the offset behind the last newline."""
        size = os.fstat(self._fd).st_size
        offset = size
        while offset > 0:
            begin = max(0, offset - _BLOCK)
            if (at := os.pread(self._fd, offset - begin, begin).rfind(b"\n")) >= 0:
                return begin + at + 1
            offset = begin
        return 0


def _holds(text: bytes, wanted: Callable[[Line], bool]) -> bool:
    try:
        return wanted(decode(text))
    except FormatError:
        return False


def time_of(line: Line) -> float:
    """Return when a line was written: seconds since the epoch."""
    return line.end if isinstance(line, Snapshot) else line.time
