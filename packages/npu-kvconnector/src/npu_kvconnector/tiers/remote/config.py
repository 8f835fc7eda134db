"""RemoteConfig: what a user may say in the options of a tier ``"type": "remote"``, parsed once and strictly.

vLLM logs its configuration, so no option holds a password or a key: those come from where the stores' own tools look.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from npu_kvconnector.checks import check_flags, check_number, check_texts
from npu_kvconnector.config import parse_bytes
from npu_kvconnector.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CODECS", "KEY_VALUE_SCHEMES", "RemoteConfig", "password_of_valkey"]

CODECS = ("none", "zstd", "fp8")
KEY_VALUE_SCHEMES = {"valkey": "valkey", "redis": "valkey", "valkeys": "valkeys", "rediss": "valkeys", "unix": "unix"}
"""Schemes of Valkey and Redis, and what Valkey's client calls them."""

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
_SECRET_WORDS = ("secret", "password", "token", "access_key", "account_key", "sas", "service_account_key", "bearer")
_NUMBERS: dict[str, tuple[type, float]] = {
    "deadline": (float, 0.1),
    "lookup_deadline": (float, 0.01),
    "refresh": (float, 0.1),
    "pack_bytes": (int, 1),
    "pending_bytes": (int, 1),
    "index_blocks": (int, 1),
    "concurrency": (int, 1),
    "busy_share": (float, 0.0001),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """The options of the remote tier."""

    url: str
    """``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder``; ``valkeys://user@host:port/0``, ``unix:///socket``."""
    namespace: str = ""
    """Keeps blocks of one model apart, for instance of two teams."""
    secret_file: str | None = None
    """A file of at least 16 bytes that a tenant's servers share and nobody else has: names and seals depend on it."""
    revision: str = ""
    """What names the weights; by default they are sampled."""
    codec: str = "none"
    """"none", "zstd" (exact, smaller by about a third) or "fp8" (half, not exact)."""
    deadline: float = 2.0
    """Seconds that a load, or a request of a store, may take; blocks that have not come by then are computed."""
    lookup_deadline: float = 0.25
    """Seconds that a question for blocks may take."""
    hedge: bool = True
    """Send reads again that take longer than 19 of 20 others; at most one in 20."""
    pack_bytes: int = 8 * 2**20
    """Bytes of an object, about; several blocks share one."""
    pending_bytes: int = 256 * 2**20
    """Bytes of blocks on their way at a time; what comes on top is not stored, or computed instead of loaded."""
    index_blocks: int = 2**20
    """Blocks of an object store that this server knows of; about 200 bytes of memory each."""
    busy_share: float = 0.01
    """Of one core, that stores take while hardly a core is idle, the server's work counted where it is on this host."""
    refresh: float = 5.0
    """Seconds between looks for objects of other servers."""
    ttl: float | None = None
    """Seconds until Valkey drops a block; objects are for a lifecycle rule of the bucket."""
    concurrency: int = 16
    """Requests at a time."""
    ca_file: str | None = None
    """Certificates to trust, in PEM."""
    insecure: bool = False
    """Allow plain HTTP and Valkey without TLS to other hosts."""
    credentials: str = "environment"
    """"environment" (variables, web identity, instance's role) or "boto3" (also AWS' profiles; needs boto3)."""
    store_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the object store, such as ``{"endpoint": "https://...", "region": "..."}``; no secrets."""
    enable_kv_events: bool = False
    """Tell of stored blocks where vLLM publishes KV events (``--kv-events-config``)."""
    locality: str = "REMOTE"
    """What KV events say: "REMOTE" or "LOCAL"."""

    def __post_init__(self) -> None:
        check_flags(self, "hedge", "insecure", "enable_kv_events")
        check_texts(self, "url", "namespace", "revision", may_be_none=("secret_file", "ca_file"))
        for name, (kind, lowest) in _NUMBERS.items():
            check_number(name, getattr(self, name), lowest, is_whole=kind is int)
        choices = {"codec": CODECS, "credentials": ("environment", "boto3"), "locality": ("REMOTE", "LOCAL")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                msg = f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                raise OptionError(msg)
        if self.busy_share > 1:
            msg = f"busy_share must be a part of one core, at most 1, not {self.busy_share!r}"
            raise OptionError(msg)
        if self.ttl is not None:
            check_number("ttl", self.ttl, 0.001)
        if not isinstance(self.store_options, dict):
            msg = f"store_options must be an object, not {self.store_options!r}"
            raise OptionError(msg)
        _check_url(self)
        _refuse_secrets(self.store_options)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> RemoteConfig:
        """Read the options of a tier, without ``type``.

        Raises:
            OptionError: an unknown key (the message names the nearest one), or a value out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                msg = f"unknown key {key!r} in the options of the remote tier: {hint}"
                raise OptionError(msg)
        if "url" not in options:
            msg = 'the remote tier needs a url, such as "s3://bucket/prefix" or "valkeys://host:6379/0"'
            raise OptionError(msg)
        values = dict(options)
        for name in ("pack_bytes", "pending_bytes"):
            if name in values:
                values[name] = parse_bytes(values[name], name)
        return cls(**values)

    @property
    def is_key_value(self) -> bool:
        """Whether the store is Valkey or Redis."""
        return urlsplit(self.url).scheme in KEY_VALUE_SCHEMES

    @property
    def is_on_this_host(self) -> bool:
        """Whether the store is a server whose work is done by the cores of this host."""
        parts = urlsplit(self.url)
        urls = [self.url, *(str(value) for key, value in self.store_options.items() if "endpoint" in key)]
        return parts.scheme == "unix" or any(_is_loopback(urlsplit(url).hostname) for url in urls)


def password_of_valkey() -> str | None:
    """Return the password from the variables that valkey-cli and redis-cli read."""
    return os.environ.get("VALKEYCLI_AUTH") or os.environ.get("REDISCLI_AUTH")


def _check_url(config: RemoteConfig) -> None:
    """Refuse unknown schemes, passwords, and what would go over a network in the clear."""
    parts = _split(config.url)
    known = (*_OBJECT_SCHEMES, *KEY_VALUE_SCHEMES)
    if parts.scheme not in known:
        msg = f"the remote tier's url must begin with one of {', '.join(f'{name}://' for name in known)}"
        raise OptionError(msg)
    if parts.scheme == "file" and not config.url.startswith("file:///"):
        msg = f"url={config.url} must name a folder by its absolute path, as in file:///var/cache/npu-kv"
        raise OptionError(msg)
    endpoints = [str(value) for key, value in config.store_options.items() if "endpoint" in key]
    if any(_holds_secret(_split(url)) for url in (config.url, *endpoints)):
        msg = (
            "the remote tier's url or endpoint holds a password or a key, which logs would show: set VALKEYCLI_AUTH, "
            "or what the store's own tools read, instead"
        )
        raise OptionError(msg)
    plain = [url for url in endpoints if _split(url).scheme == "http"]
    if KEY_VALUE_SCHEMES.get(parts.scheme) == "valkey":
        plain.append(config.url)
    for url in plain:
        if not config.insecure and not _is_loopback(urlsplit(url).hostname):
            msg = f"{url} is not encrypted: use https:// or valkeys://, or set insecure to true in a network you trust"
            raise OptionError(msg)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        msg = f"the remote tier's url or endpoint cannot be read ({error}): write it as s3://bucket/prefix"
        raise OptionError(msg) from error


def _holds_secret(url: SplitResult) -> bool:
    """Return whether a URL has a password, or a parameter such as a signature that lets its holder in."""
    names = [name.lower() for name, _ in parse_qsl(url.query, keep_blank_values=True)]
    return url.password is not None or any(word in name for name in names for word in (*_SECRET_WORDS, "sig"))


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _refuse_secrets(options: Mapping[str, Any]) -> None:
    for key in options:
        if any(word in key.lower() for word in _SECRET_WORDS):
            msg = f"store_options holds {key!r}, which logs would show: the stores' own variables and files are read"
            raise OptionError(msg)
