"""RemoteConfig: refusals that name the way out, and no secret in what vLLM logs."""

from __future__ import annotations

from typing import Any

import pytest

from npu_kvconnector.errors import OptionError
from npu_kvconnector.tiers.remote.config import RemoteConfig

S3 = {"url": "s3://bucket/prefix"}


def test_sizes_may_have_units() -> None:
    assert RemoteConfig.parse({**S3, "pack_bytes": "4MiB"}).pack_bytes == 4 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a url"),
        ({"url": "ftp://host"}, "must begin with one of"),
        ({**S3, "deadlin": 1}, "did you mean 'deadline'"),
        ({**S3, "deadline": 0}, "deadline must be a number of at least"),
        ({**S3, "deadline": "2"}, "deadline"),
        ({**S3, "concurrency": 1.5}, "concurrency"),
        ({**S3, "codec": "gzip"}, "one of none, zstd, fp8"),
        ({**S3, "credentials": "here"}, "one of environment, boto3"),
        ({**S3, "ttl": -1}, "ttl"),
        ({**S3, "ttl": "5"}, "ttl"),
        ({**S3, "deadline": float("nan")}, "deadline must be a number"),
        ({**S3, "lookup_deadline": float("inf")}, "lookup_deadline must be a number"),
        ({**S3, "pack_bytes": "8 Mibi"}, "pack_bytes must be a number of bytes or a size"),
        ({**S3, "insecure": "false"}, "insecure must be true or false"),
        ({**S3, "hedge": "false"}, "hedge must be true or false"),
        ({**S3, "enable_kv_events": 1}, "enable_kv_events must be true or false"),
        ({"url": 5}, "url must be a text"),
        ({"url": "s3://[bucket"}, "cannot be read"),
        ({**S3, "namespace": 5}, "namespace must be a text"),
        ({**S3, "secret_file": 5}, "secret_file must be a text"),
        ({**S3, "ca_file": 5}, "ca_file must be a text"),
        ({**S3, "store_options": []}, "store_options must be an object"),
        ({**S3, "store_options": {"endpoint": "https://user:canary@minio:9000"}}, "logs would show"),
        ({"url": "az://container/prefix?sv=1&sig=canary"}, "logs would show"),
        ({**S3, "busy_share": 0}, "busy_share must be a number of at least"),
        ({**S3, "busy_share": 2}, "part of one core, at most 1"),
        ({**S3, "store_options": {"secret_access_key": "canary"}}, "the stores' own variables"),
        ({**S3, "store_options": {"aws_session_token": "canary"}}, "the stores' own variables"),
        ({"url": "valkeys://user:canary@host/0"}, "VALKEYCLI_AUTH"),
        ({"url": "unix:///socket?password=canary"}, "VALKEYCLI_AUTH"),
        ({"url": "valkey://host/0"}, "valkeys://"),
        ({"url": "redis://10.0.0.1/0"}, "valkeys://"),
        ({**S3, "store_options": {"endpoint": "http://host:9000"}}, "not encrypted"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as refusal:
        RemoteConfig.parse(options)
    assert "canary" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "is_here"),
    [
        ({"url": "valkey://localhost/0"}, True),
        ({"url": "valkeys://[::1]/0"}, True),
        ({"url": "unix:///run/valkey.sock"}, True),
        ({**S3, "store_options": {"endpoint": "http://127.0.0.1:9000"}}, True),
        ({"url": "valkeys://host/0"}, False),
        ({**S3, "store_options": {"endpoint": "https://minio.example"}}, False),
        (S3, False),
    ],
)
def test_a_server_on_this_host_is_known(options: dict[str, Any], is_here: bool) -> None:
    assert RemoteConfig.parse(options).is_on_this_host is is_here


@pytest.mark.parametrize(
    "options",
    [
        {"url": "valkey://localhost/0"},
        {"url": "valkey://[::1]:6379/0"},
        {"url": "unix:///run/valkey.sock"},
        {"url": "rediss://user@host/0"},
        {"url": "valkey://host/0", "insecure": True},
        {**S3, "store_options": {"endpoint": "http://127.0.0.1:9000", "region": "us-east-1"}},
        {**S3, "store_options": {"endpoint": "https://minio.example"}},
    ],
)
def test_what_is_encrypted_or_stays_on_the_host_is_taken(options: dict[str, Any]) -> None:
    assert RemoteConfig.parse(options).url == options["url"]
