"""Reading: the lines of all files of a command as one stream; what cannot be read is left out, counted and said."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from npu_statlogger.errors import FormatError, InputError, NoLinesError
from npu_statlogger.lines import Line, RequestLine
from npu_statlogger.reading import files_of, is_packed, read_lines
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import bench
from npu_statlogger.tools.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Reading", "no_lines", "open_error"]

_SHOWN = 5
"""Lines left out that are named one by one; further ones are only counted."""

_SEARCHED = 32
"""Files at most for which others that were rotated away are looked for."""


class Reading:
    """The lines of files, one file after the other, in constant memory.

    A file is one that npu-statlogger wrote, with those that were rotated away from it, or gzip of one, or a result of
    `vllm bench serve`. Damaged lines and torn ends (a write in progress, or a writer that was killed) are left out; the
    first of them are named on stderr, all are counted in `left_out`.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Find the files.

        Raises:
            InputError: a file is not there, or results of a client stand beside lines of a server.
        """
        try:
            results = {file for file in files if bench.is_result(file)}
        except OSError as error:
            raise open_error(error) from error
        if results and results != set(files):
            msg = (
                f"{results.pop()} is a client's result, others are lines of a server, which has counted the same "
                f"requests; give them to `npu-stat report` or `diff`, which keep them apart."
            )
            raise InputError(msg)
        self.of_client = bool(results)
        self.files = list(dict.fromkeys(files)) if results else _with_rotated(files)
        self.kinds: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Line]:
        """Yield each whole line of whatever kind.

        Raises:
            InputError: a file cannot be read.
            NoLinesError: there was no whole line.
        """
        for file in self.files:
            yield from self.of_file(file)
        self.finish()

    def of_file(self, file: Path) -> Iterator[Line]:
        """Yield each whole line of one of `files`; raises InputError if it cannot be read."""
        try:
            for line in bench.read_snapshots(file) if self.of_client else self._whole_lines(file):
                self.kinds[getattr(line, "kind", "interval")] += 1
                yield line
        except OSError as error:
            raise open_error(error) from error

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield the interval lines alone; raises as `__iter__`, and as `need_intervals`."""
        for line in self:
            if isinstance(line, Snapshot):
                yield line
        self.need_intervals()

    def requests(self) -> Iterator[Request]:
        """Yield the requests that have a line, or that a client's detailed result holds; raises as `__iter__`."""
        if self.of_client:
            for file in self.files:
                yield from self._client_requests(file)
            self.finish()
            return
        for line in self:
            if isinstance(line, RequestLine):
                yield Request.of_line(line)

    def finish(self) -> None:
        """Say how many lines were left out beyond those named; raise NoLinesError if none was whole."""
        total = self.left_out.total()
        if total > _SHOWN:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.left_out.items()))
            print(f"npu-stat: {total} lines left out in all: {kinds}.", file=sys.stderr)
        if not self.kinds:
            raise no_lines(self.files)

    def need_intervals(self) -> None:
        """Raise InputError if none of the lines that were read is an interval's."""
        if not self.kinds["interval"]:
            msg = (
                "the files hold no interval line yet; the first comes after NPU_STATLOGGER_INTERVAL seconds of traffic."
            )
            raise InputError(msg)

    def _client_requests(self, file: Path) -> Iterator[Request]:
        for request in bench.read_requests(file):
            self.kinds["request"] += 1
            yield request

    def _whole_lines(self, file: Path) -> Iterator[Line]:
        number = 0
        for number, line in enumerate(read_lines(file), start=1):
            if isinstance(line, FormatError):
                self._leave_out("damaged", f"{file}:{number}: left out: {line}")
            else:
                yield line
        if _is_torn(file):
            self._leave_out("torn", f"{file}:{number + 1}: left out: the line has no end.")

    def _leave_out(self, kind: str, message: str) -> None:
        self.left_out[kind] += 1
        if self.left_out.total() <= _SHOWN:
            print(f"npu-stat: {message}", file=sys.stderr)


def open_error(error: OSError) -> InputError:
    """Return what npu-stat says of a file that the system refuses."""
    return InputError(f"cannot read {error.filename}: {error.strerror}.")


def no_lines(files: Sequence[Path]) -> NoLinesError:
    """Return what npu-stat says of files without a whole line."""
    return NoLinesError(f"no whole line in {', '.join(map(str, files[:_SHOWN]))}{', ...' if files[_SHOWN:] else ''}.")


def _with_rotated(files: Sequence[Path]) -> list[Path]:
    """Add what was rotated away, unless so many are named that a pattern did it: that named those too."""
    if len(files) > _SEARCHED:
        return list(dict.fromkeys(files))
    return list(dict.fromkeys(part for file in files for part in files_of(file)))


def _is_torn(file: Path) -> bool:
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        return not is_packed(opened.fileno()) and size > 0 and os.pread(opened.fileno(), 1, size - 1) != b"\n"
