"""A Prometheus push gateway, by prometheus_client: for jobs that end before they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, push_to_gateway

from npu_statlogger.sinks.exporter import SECONDS, Exporter
from npu_statlogger.sinks.families import Families

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["Push", "open_sink"]


def open_sink(config: StatLoggerConfig, run: Run) -> Push:
    """Return the sink; the gateway is first asked when there is something to bring."""
    return Push(config.push, run)


class Push(Exporter):
    """Replaces the figures of this process at the gateway: job "vllm", instance host:pid."""

    name: ClassVar[str] = "push"

    def __init__(self, url: str, run: Run) -> None:
        super().__init__()
        self._url, self._instance = url, run.process
        self._families, self._registry = Families(run.model), CollectorRegistry()
        self._registry.register(self._families)

    def write(self, lines: Sequence[Line]) -> None:
        """Count interval lines and push all figures."""
        self._families.add(lines)
        super().write(())

    def send(self) -> None:
        """Push.

        Raises:
            OSError: the gateway did not take them.
        """
        push_to_gateway(self._url, "vllm", self._registry, {"instance": self._instance}, timeout=SECONDS)
