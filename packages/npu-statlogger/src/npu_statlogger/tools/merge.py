"""`npu-stat merge`: the lines of many files as one file, in the order of time, those of one engine and span added up.

Memory is that of one span: files are read side by side, in rounds where there are more than may be open at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import heapq
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from npu_statlogger.errors import InputError
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.arguments import add_files, seconds
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from npu_statlogger.lines import Line
    from npu_statlogger.tools.arguments import Commands

__all__ = ["add", "in_order", "merged"]

_OPEN = 100
"""Files that are read side by side."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("merge", help="write the lines of many files as one file, in the order of time")
    add_files(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="a new file (.gz: compressed); else stdout")
    text = "span in which the lines of an engine become one (default 60 s); 0 keeps each line"
    parser.add_argument("--every", type=seconds, default=60.0, metavar="TIME", help=text)
    parser.set_defaults(run=_run)


def in_order(reading: Reading, files: Sequence[Path], folder: Path) -> Iterator[Line]:
    """Yield the lines of `files` in the order of time (of each file: as they stand there)."""
    if len(files) <= _OPEN:
        yield from heapq.merge(*(reading.of_file(file) for file in files), key=_time)
        return
    rounds = []
    for begin in range(0, len(files), _OPEN):
        rounds.append(folder / f"{begin}-{len(files)}.jsonl")
        with rounds[-1].open("w") as part:
            _write(part, in_order(reading, files[begin : begin + _OPEN], folder))
    yield from in_order(Reading(rounds), rounds, folder)


def merged(lines: Iterable[Line], every: float) -> Iterator[Line]:
    """Add up the interval lines of the same engine and span of `every` seconds; other lines go through.

    Lines out of order give a span more than one line, which means the same.
    """
    spans: dict[tuple[int, ...], Snapshot] = {}
    slot = 0.0
    for line in lines:
        if not isinstance(line, Snapshot) or not every:
            yield line
            continue
        if line.start // every != slot:
            yield from spans.values()
            spans, slot = {}, line.start // every
        spans.setdefault(tuple(sorted(line.engines)), Snapshot()).merge(line)
    yield from spans.values()


def _run(options: argparse.Namespace) -> int:
    reading = Reading(options.files)
    if reading.of_client:
        msg = "results of `vllm bench serve` are no lines; merge takes lines alone."
        raise InputError(msg)
    folder = options.output.parent if options.output else None
    try:
        with tempfile.TemporaryDirectory(prefix="npu-stat-", dir=folder) as rounds, _output(options.output) as output:
            count = _write(output, merged(in_order(reading, reading.files, Path(rounds)), options.every))
            reading.finish()
    except BrokenPipeError:
        raise
    except OSError as error:
        msg = f"cannot write {options.output or 'the output'}: {error.strerror}."
        raise InputError(msg) from error
    print(f"npu-stat: {count} lines of {len(reading.files)} files.", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """Give a file that appears under its name once it is whole, or stdout."""
    if path is None:
        yield sys.stdout
        return
    if path.exists():
        msg = f"{path} is there already; name a new file."
        raise InputError(msg)
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        private = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(private, "wb") as plain, _text(plain, path) as text:
            yield text
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _text(file: BinaryIO, path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(fileobj=file, mode="wb"), encoding="utf-8")
    return io.TextIOWrapper(file, encoding="utf-8")


def _write(file: IO[str], lines: Iterable[Line]) -> int:
    count = 0
    for line in lines:
        file.write(json.dumps(line.to_dict(), allow_nan=False, separators=(",", ":")) + "\n")
        count += 1
    return count


def _time(line: Line) -> float:
    return line.start if isinstance(line, Snapshot) else line.time
