"""TensorBoard's event files, by TensorBoard's own writer: every figure as a scalar over the intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, place
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["TensorBoard", "open_sink"]


def open_sink(config: StatLoggerConfig, run: Run) -> TensorBoard:
    """Make the directory and this process's event file in it.

    Raises:
        OSError: the directory cannot be made or written.
    """
    return TensorBoard(str(config.tensorboard), run)


class TensorBoard(Sink):
    """Writes scalars `engine_<index>/<figure>`, without an engine `front_end/<figure>`; a step is an interval."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self, directory: str, run: Run) -> None:
        self._writer = EventFileWriter(directory, filename_suffix=f".{run.process.replace(':', '-')}")
        self._step = 0

    def write(self, lines: Sequence[Line]) -> None:
        """Add scalars and hand them to the system.

        Raises:
            OSError: the file could not be written.
        """
        self._step += 1
        for line in lines:
            if isinstance(line, Snapshot):
                figures = {f"{place(line)}/{name}": value for name, value in flat(line).items()}
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
                self._writer.add_event(Event(wall_time=line.end, step=self._step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
