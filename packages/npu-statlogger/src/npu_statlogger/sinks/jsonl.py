"""JSON lines in a file: the whole of every line, for npu-stat, jq and whatever reads JSON."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.rotation import Rotation
from npu_statlogger.sinks.base import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["JsonLines", "open_sink"]

logger = logging.getLogger("vllm.npu_statlogger")


def open_sink(config: StatLoggerConfig, run: Run) -> JsonLines:
    """Open the file; see LineWriter for what it raises."""
    assert config.path is not None
    rotation = Rotation(config.rotate_mib * 2**20, config.rotate_hours * 3600, config.keep, config.compress)

    def first() -> bytes:
        # Of now: rotation reads from this line when the file was begun.
        return encode(replace(run, time=time.time()))

    return JsonLines(LineWriter(config.path, rotation=rotation, first=first))


class JsonLines(Sink):
    """Appends every line."""

    name: ClassVar[str] = "file"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines; one that no JSON can say is left out with a message."""
        self._writer.append(*filter(None, map(_encode_or_tell, lines)))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _encode_or_tell(line: Line) -> bytes:
    try:
        return encode(line)
    except (TypeError, ValueError) as error:
        logger.warning("A line of kind %s was left out: %s.", getattr(line, "kind", "interval"), error)
        return b""
