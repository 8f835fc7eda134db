"""Prometheus, by prometheus_client: a collector beside vLLM's own metrics, or a port of its own.

Names are `npu_statlogger_<figure>`. Of a distribution there is a summary: count and sum since the start, and as
quantiles true percentiles of all values since then, within the sketch's error and not of the edges of fixed buckets.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from npu_statlogger.config import host_and_port
from npu_statlogger.errors import ConfigError
from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.families import Families

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Thread

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["Prometheus", "open_sink"]

logger = logging.getLogger("vllm.npu_statlogger")

_PORTS = 64


def open_sink(config: StatLoggerConfig, run: Run) -> Prometheus:
    """Register a collector, and open the port if one is asked for.

    Raises:
        ConfigError: "vllm" with several API servers, whose metrics vLLM gathers from files.
        OSError: no port is free, or the host is none of this machine.
    """
    if config.prometheus != "vllm":
        sink = Prometheus(CollectorRegistry(), run.model)
        sink.serve(*host_and_port(config.prometheus))
        return sink
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        msg = (
            "npu_statlogger: prometheus is 'vllm', but with several API servers vLLM serves what it finds in "
            "PROMETHEUS_MULTIPROC_DIR alone; give HOST:PORT, at which each server then serves its own share."
        )
        raise ConfigError(msg)
    return Prometheus(REGISTRY, run.model)


class Prometheus(Sink):
    """Holds the figures that a scrape gets."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._families = registry, Families(model)
        self._server: tuple[Any, Thread] | None = None
        registry.register(self._families)

    def serve(self, host: str, port: int) -> int:
        """Serve the registry at the first free port from `port` on, since each API server needs one, and return it.

        Raises:
            OSError: none is free, or the host is none of this machine.
        """
        last = min(port + _PORTS, 1 << 16) - 1
        for candidate in range(port, last + 1):
            try:
                self._server = start_http_server(candidate, host, self._registry)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                where = f"{host}, port {candidate}"
                msg = f"npu_statlogger: prometheus cannot serve at {where}: {error.strerror}; name another."
                raise OSError(msg) from error
            served = self._server[0].server_port  # which the system chose if 0 was asked for
            shown = f"[{host}]" if ":" in host else host
            logger.info("Statistics are served at http://%s:%d/metrics.", shown, served)
            return served
        msg = f"npu_statlogger: prometheus finds all ports of {host} from {port} to {last} taken; name another."
        raise OSError(msg)

    def write(self, lines: Sequence[Line]) -> None:
        """Count interval lines."""
        self._families.add(lines)

    def close(self) -> None:
        """Unregister, and close the port."""
        self._registry.unregister(self._families)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
