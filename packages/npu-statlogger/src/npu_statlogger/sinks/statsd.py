"""StatsD over UDP, by the client of the package statsd: increments of counters, gauges, percentiles as gauges.

Datagrams that nobody takes are lost, as StatsD means it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import statsd

from npu_statlogger.config import host_and_port
from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, place
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["Statsd", "open_sink"]


def open_sink(config: StatLoggerConfig, run: Run) -> Statsd:
    """Return the sink; the name of the server is looked up when there is something to bring."""
    return Statsd(*host_and_port(config.statsd))


class Statsd(Sink):
    """Sends `vllm.engine_<index>.<figure>`, without an engine `vllm.front_end.<figure>`."""

    name: ClassVar[str] = "statsd"

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._client: statsd.StatsClient | None = None

    def write(self, lines: Sequence[Line]) -> None:
        """Send what the lines say.

        Raises:
            OSError: the server's name is not known.
        """
        if self._client is None:
            self._client = statsd.StatsClient(*self._address, prefix="vllm", ipv6=":" in self._address[0])
        with self._client.pipeline() as batch:
            for line in lines:
                if isinstance(line, Snapshot):
                    _send(batch, line)

    def close(self) -> None:
        """Close the socket."""
        if self._client is not None:
            self._client.close()


def _send(batch: statsd.client.udp.Pipeline, line: Snapshot) -> None:
    for name, value in flat(line).items():
        path = f"{place(line)}.{re.sub('[^a-zA-Z0-9_.-]', '_', name)}"
        if name in line.counters:
            batch.incr(path, line.counters[name])
        elif name in line.totals_nano:
            batch.incr(path, value)
        else:
            if value < 0:
                batch.gauge(path, 0)  # a sign would mean a change
            batch.gauge(path, value)
