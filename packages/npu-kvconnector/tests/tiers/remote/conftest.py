"""Real stores, and servers with a remote tier over each."""

from __future__ import annotations

import os

# vLLM infers a device as soon as it is imported; these tests run in an environment without a platform plugin.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("obstore")

from tests.support.remote_tier import Server, s3_options
from tests.support.stores import AzureServer, GCSServer, S3Server, ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Return a maker of servers, which are shut down after the test."""
    servers: list[Server] = []

    def make(options: dict[str, Any], **config: Any) -> Server:
        servers.append(Server(options, **config))
        return servers[-1]

    yield make
    for server in servers:
        server.tier.shutdown()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(S3Server(tmp_path_factory.mktemp("s3")))


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    yield from running(AzureServer(tmp_path_factory.mktemp("azure")))


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCSServer]:
    yield from running(GCSServer(tmp_path_factory.mktemp("gcs")))


def running(server: Any) -> Iterator[Any]:
    """Start a server with a bucket, and end it after the tests."""
    server.start()
    server.make_bucket("blocks")
    yield server
    server.kill()


@pytest.fixture(
    params=["file", "s3", "valkey", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("azure", "gcs"))]
)
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options of a tier over each kind of store."""
    kind = request.param
    if kind == "file":
        return {"url": f"file://{tmp_path / 'store'}", "refresh": 0.1}
    server = request.getfixturevalue(kind)
    if kind == "valkey":
        return {"url": server.url}
    if kind == "s3":
        return s3_options(server, tmp_path.name, monkeypatch)
    environment = server.environment if kind == "azure" else server.environment(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = {"url": f"{'az' if kind == 'azure' else 'gs'}://blocks/{tmp_path.name}", "refresh": 0.1}
    return place | ({"store_options": {"endpoint": server.endpoint}} if kind == "azure" else {"insecure": True})
