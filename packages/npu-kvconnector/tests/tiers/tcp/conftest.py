"""Servers with a p2p tier over TCP, shut down after the test."""

from __future__ import annotations

import os

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from tests.support.tcp_tier import TcpServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., TcpServer]]:
    """Return a maker of servers."""
    servers: list[TcpServer] = []

    def make(options: dict[str, Any] | None = None, **config: Any) -> TcpServer:
        servers.append(TcpServer(tmp_path, options, **config))
        return servers[-1]

    yield make
    for server in servers:
        server.tier.shutdown()
