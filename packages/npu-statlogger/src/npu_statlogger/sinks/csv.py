"""Comma-separated values: a row for each figure of each interval, so that the columns never change."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, ClassVar

from npu_statlogger.jsonl import LineWriter
from npu_statlogger.rotation import Rotation
from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, origin
from npu_statlogger.snapshot import SCHEMA, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["COLUMNS", "Csv", "open_sink"]

COLUMNS = ("schema", "start", "end", "process", "model", "engine", "figure", "value")


def open_sink(config: StatLoggerConfig, run: Run) -> Csv:
    """Open the file; see LineWriter for what it raises."""
    assert config.csv is not None
    rotation = Rotation(config.rotate_mib * 2**20, 0, config.keep, config.compress)
    begin, header = SCHEMA.partition("/")[0].encode() + b"/", _rows([COLUMNS])
    return Csv(LineWriter(config.csv, rotation=rotation, begin=begin, header=header))


class Csv(Sink):
    """Appends the figures of interval lines; each write is whole or absent, as in the file of lines."""

    name: ClassVar[str] = "csv"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, lines: Sequence[Line]) -> None:
        """Append a row for each figure."""
        text = b"".join(_rows(_figures(line)) for line in lines if isinstance(line, Snapshot))
        if text:
            self._writer.append(text)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _figures(line: Snapshot) -> list[tuple[object, ...]]:
    return [(SCHEMA, *origin(line).values(), name, value) for name, value in flat(line).items()]


def _rows(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
