"""A real `vllm serve` of the demo model for tests, and what tests ask it beside the API: metrics and load.

It is a fork of a process that has imported vLLM, which spares half of its start, unless a test asks for a fresh one.
``NPU_TEST_SERVER_PYTHON`` names another interpreter to serve with, such as one with vLLM's CPU build: a failure that is
seen there too is not the device's.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

import httpx

from npu_platform.demo import MODEL
from npu_platform.demo.server import Server
from tests.support.vllm_process import start_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.forks import Fork

__all__ = [
    "LONG",
    "PATIENCE",
    "READY_TIMEOUT",
    "Load",
    "demo_server",
    "metric",
    "serve",
    "serve_demo",
    "server_of",
    "until",
]

READY_TIMEOUT = 300.0

PATIENCE = 10.0
"""Seconds without a token after which a client of :class:`Load` hangs up."""

LONG: dict[str, Any] = {"prompt": "1 2 3", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
"""A completion that takes seconds: nearly as many tokens as the demo model's context holds."""


@contextlib.contextmanager
def serve_demo(folder: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    """Serve the demo model until the block ends; `arguments` are further ones of ``vllm serve``; see `server_of`."""
    with demo_server(folder, *arguments, **options) as server:
        server.wait_until_ready(READY_TIMEOUT)
        yield server


@contextlib.contextmanager
def serve(model: Path, folder: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    """Serve any model so."""
    with server_of(model, folder, *arguments, **options) as server:
        server.wait_until_ready(READY_TIMEOUT)
        yield server


def demo_server(folder: Path, *arguments: str, **options: Any) -> Server:
    """Return a small server of the demo model, for a ``with`` that starts it and does not wait; see `server_of`."""
    small = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20))
    return server_of(MODEL, folder, *small, *arguments, **options)


def server_of(
    model: Path, folder: Path, *arguments: str, log: str = "server.log", fresh: bool = False, **environ: str
) -> Server:
    """Return a server of a model, named "demo", for a ``with`` that starts it and does not wait until it is ready.

    Its log is in `folder`; `environ` are further environment variables; a `fresh` one has imported nothing before.
    """
    python = os.environ.get("NPU_TEST_SERVER_PYTHON")
    kind = Server if fresh or python else ForkedServer
    options = {"log": folder / log, "python": python or sys.executable, "environment": os.environ | environ}
    return kind(model, *arguments, **options)


class ForkedServer(Server):
    """A server that spares the imports."""

    def _start(self, log: IO[bytes]) -> Fork:
        _, _, module, *arguments = self._command
        return start_module(module, *arguments, environ=self._environment or os.environ, output=log)


def metric(server: Server, name: str, **labels: str) -> float:
    """Return the sum of the samples of a Prometheus metric that carry all `labels`."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for found, value in samples if all(label in found for label in wanted))


def until(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    """Return whether `condition` came true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Load:
    """Clients that stream one long completion each in threads; whatever the server does to them is no error here."""

    def __init__(self, server: Server, clients: int) -> None:
        self.received = [0] * clients
        self._threads = [threading.Thread(target=self._stream, args=(server, i), daemon=True) for i in range(clients)]

    def start(self) -> None:
        """Start the clients and return when each has got a token. Raises TimeoutError when they do not."""
        for thread in self._threads:
            thread.start()
        if not until(lambda: all(self.received), 60):
            msg = f"after 60 s the clients had received {self.received} events"
            raise TimeoutError(msg)

    def join(self) -> None:
        """Wait until every client's connection has ended. Raises TimeoutError when one goes on for 30 s."""
        for thread in self._threads:
            thread.join(30)
        if any(thread.is_alive() for thread in self._threads):
            msg = "a client still hangs 30 s after the server's end"
            raise TimeoutError(msg)

    def _stream(self, server: Server, client: int) -> None:
        body = {"model": server.name, "stream": True, **LONG}
        url = f"{server.url}/v1/completions"
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=PATIENCE, trust_env=False) as answer,
        ):
            for _ in answer.iter_lines():
                self.received[client] += 1
