"""Base of the sinks that send cumulative figures: an attempt that fails is made up for by the next."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING

from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import Cumulative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.lines import Line

__all__ = ["SECONDS", "Exporter"]

logger = logging.getLogger("vllm.npu_statlogger")

SECONDS = 5.0
"""How long one attempt may take."""


class Exporter(Sink):
    """Adds up what is brought and sends all of it each time."""

    def __init__(self) -> None:
        self.figures = Cumulative()
        self.unsent = False

    @abstractmethod
    def send(self) -> None:
        """Send all figures, in SECONDS at most; raise if the other side did not take them."""

    def write(self, lines: Sequence[Line]) -> None:
        """Count interval lines and send; what could not be sent is sent with the next ones."""
        self.figures.add(lines)
        self._try()

    def close(self) -> None:
        """Send what the last attempt could not."""
        if self.unsent:
            self._try()

    def _try(self) -> None:
        try:
            self.send()
        except Exception as error:  # noqa: BLE001 # whatever the library raises, the next attempt makes up for it
            if not self.unsent:
                logger.warning(
                    "Statistics could not be sent to %s (%s: %s); the next interval sends them too.",
                    self.name, type(error).__name__, error,
                )  # fmt: skip
            self.unsent = True
            return
        if self.unsent:
            logger.info("Statistics reach %s again.", self.name)
        self.unsent = False
