"""What a sink is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.lines import Line

__all__ = ["Sink"]


class Sink(ABC):
    """A place that lines are brought to; its module has `open_sink(config, run)`, which makes it."""

    name: ClassVar[str]
    """How messages and the counter `sink_lines_dropped` name it."""

    @abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Take lines: all of them, or none and raise; then they are brought again, later ones merged into them.

        Called by one thread only. A Snapshot that arrives here is shared with other sinks and must not be changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections; called once, after the last `write`."""
