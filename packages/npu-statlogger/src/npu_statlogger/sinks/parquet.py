"""Parquet files in a directory, by pyarrow: columns for pandas, DuckDB, Spark.

A Parquet file cannot be appended to: rows are gathered, and a file appears under its name when it is whole. That is
with ROWS, with the first line after SECONDS, and at the end: a killed process loses what was gathered until then, which
the file of lines beside it has.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, origin, row
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["ROWS", "SECONDS", "Parquet", "open_sink"]

ROWS, SECONDS = 50_000, 300.0


def open_sink(config: StatLoggerConfig, run: Run) -> Parquet:
    """Make the directory.

    Raises:
        OSError: it cannot be made or written.
    """
    assert config.parquet is not None
    config.parquet.mkdir(parents=True, exist_ok=True)
    if not os.access(config.parquet, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(config.parquet))
    sink = Parquet(config.parquet)
    sink.write([run])
    return sink


class Parquet(Sink):
    """Writes files `<table>-<time in ns>-<pid>.parquet`: figures, requests, steps, runs, notes."""

    name: ClassVar[str] = "parquet"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._due = time.monotonic() + SECONDS

    def write(self, lines: Sequence[Line]) -> None:
        """Gather rows, and write files if there are many or they are old.

        Raises:
            OSError: a file could not be written; rows gathered before these stay.
        """
        before = {table: len(rows) for table, rows in self._tables.items()}
        for line in lines:
            self._gather(line)
        full = any(len(rows) >= ROWS for rows in self._tables.values())
        if not (full or time.monotonic() >= self._due):
            return
        try:
            self._flush()
        except BaseException:
            for table, rows in self._tables.items():  # the courier brings these lines again
                del rows[before.get(table, 0) :]
            raise

    def close(self) -> None:
        """Write what is gathered."""
        self._flush()

    def _gather(self, line: Line) -> None:
        if isinstance(line, Snapshot):
            self._tables.setdefault("figures", []).extend(_rows(line))
            return
        self._tables.setdefault(f"{line.kind}s", []).append(row(line))

    def _flush(self) -> None:
        parts = []
        for table, rows in self._tables.items():
            if rows:
                final = self._directory / f"{table}-{time.time_ns()}-{os.getpid()}.parquet"
                part = final.with_name(f".{final.name}.part")
                os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))  # readable by its owner only
                pq.write_table(pa.Table.from_pylist(rows), part)
                parts.append((part, final))
        for part, final in parts:  # when all are whole, so that a failure leaves none
            part.rename(final)
        self._tables.clear()
        self._due = time.monotonic() + SECONDS


def _rows(line: Snapshot) -> list[dict[str, Any]]:
    return [{**origin(line), "figure": name, "value": float(value)} for name, value in flat(line).items()]
