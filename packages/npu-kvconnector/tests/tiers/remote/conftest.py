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
from tests.support.stores import S3Server, ValkeyServer

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
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    server.make_bucket("blocks")
    yield server
    server.kill()


@pytest.fixture(params=["file", "s3", "valkey"])
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options of a tier over each kind of store."""
    if request.param == "file":
        return {"url": f"file://{tmp_path / 'store'}", "refresh": 0.1}
    if request.param == "valkey":
        return {"url": request.getfixturevalue("valkey").url}
    return s3_options(request.getfixturevalue("s3"), tmp_path.name, monkeypatch)
