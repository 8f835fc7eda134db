"""What the remote tier says of a store that it cannot use: the setting, what happened, and the way out."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from npu_kvconnector.errors import OptionError
from tests.support.remote_tier import Server, s3_options
from tests.support.server import until
from tests.support.stores import S3Server, ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Serve = Callable[..., Server]


@pytest.mark.parametrize(
    ("password", "database", "way_out"),
    [
        (None, 0, r"AuthenticationError\): set VALKEYCLI_AUTH to the server's password"),
        ("canary-right", 99, r"ResponseError\): see whether the server has the database that url names"),
    ],
)
def test_what_a_valkey_refuses_is_said_at_the_start_with_the_way_out(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    password: str | None,
    database: int,
    way_out: str,
) -> None:
    valkey = ValkeyServer(tmp_path, password="canary-right")
    valkey.start()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    if password is not None:
        monkeypatch.setenv("VALKEYCLI_AUTH", password)
    url = valkey.url.removesuffix("0") + str(database)
    with caplog.at_level(logging.WARNING):
        serve({"url": url})
        assert until(lambda: "starts without its store" in caplog.text)
    valkey.kill()
    assert re.search(f"Valkey at url={url} did not answer .{way_out}", caplog.text)
    assert "canary" not in caplog.text


@pytest.mark.parametrize("silent", [False, True])
def test_a_valkey_that_is_not_there_is_said_at_the_start(
    serve: Serve,
    valkey: ValkeyServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    silent: bool,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    if silent:
        valkey.stall()
    url = valkey.url if silent else "valkey://127.0.0.1:1/0"
    with caplog.at_level(logging.WARNING):
        serve({"url": url, "deadline": 0.3})
        assert until(lambda: "starts without its store" in caplog.text)
    assert (f"no answer of url={url}" if silent else "whether it speaks TLS (valkeys://)") in caplog.text


def test_a_valkey_that_is_full_says_so_though_it_answers_questions(
    serve: Serve, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import valkey as client

    client.Valkey.from_url(valkey.url).config_set("maxmemory", 1)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        server = serve({"url": valkey.url})
        for number in range(3):
            assert server.lookup(number) == [False]
            assert not server.store(number).success
    assert caplog.text.count("The remote tier cannot store") == 1
    assert "OutOfMemoryError): the server is full: set its maxmemory-policy to allkeys-lru" in caplog.text


def test_a_bucket_that_is_not_there_is_said_at_the_start(
    serve: Serve, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        server = serve({**s3_options(s3, "p", monkeypatch), "url": "s3://elsewhere/p"})
        assert until(lambda: "did not list (GenericError): see whether the bucket" in caplog.text)
        assert not server.store(1).success
    assert "url=s3://elsewhere/p" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"url": "file://relative/folder"}, "url=file://relative/folder must name a folder by its absolute path"),
        ({"url": "file:///proc/nowhere"}, r"\(url=file:///proc/nowhere\) cannot be opened: .*No such file"),
        ({"url": "valkeys://localhost:1/0", "ca_file": "/no/ca.pem"}, "ca_file=/no/ca.pem cannot be read"),
        ({"url": "s3://b/x", "ca_file": "/no/ca.pem"}, "ca_file=/no/ca.pem cannot be read"),
        ({"url": "s3://b/x", "store_options": {"endpont": "https://s3"}}, "'endpont' is not valid for store 'S3'.$"),
        ({"url": "az://blocks/x"}, "Account must be specified: set AZURE_STORAGE_ACCOUNT_NAME"),
        ({"url": "s3://b/x", "secret_file": "/no/secret"}, "secret_file=/no/secret cannot be read.*openssl rand"),
    ],
)
def test_what_cannot_work_ends_the_start_with_the_way_out(serve: Serve, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match) as refused:
        serve(wrong)
    assert "\n" not in str(refused.value)
