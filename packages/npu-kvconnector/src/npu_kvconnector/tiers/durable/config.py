"""DurableConfig: what a user may say in the options of a tier ``"type": "durable"``, parsed once and strictly."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_kvconnector.checks import check_flags, check_number, check_texts
from npu_kvconnector.config import parse_bytes
from npu_kvconnector.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DurableConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig:
    """The options of the durable tier."""

    path: str
    """The folder of the store: one that is empty, is to be made, or holds a store."""
    bytes: int
    """The most that the store takes on disk, index and all."""
    namespace: str = ""
    """Keeps blocks of one model apart, for instance of two tenants."""
    secret_file: str | None = None
    """A file of at least 16 bytes: names of blocks are derived from it (HMAC), so that they tell nothing without it."""
    encrypt: bool = False
    """Encrypt blocks at rest (AES-256-GCM) with a key derived from the secret."""
    revision: str = ""
    """What names the weights; by default they are sampled."""
    direct: bool = True
    """Go past the page cache where the filesystem can do that."""
    sync_seconds: float = 1.0
    """How long after it was handed to the tier a block is durable, where the disk keeps up; more lets stores wait for
    idle cores."""
    eviction_policy: str = "lru"
    """"lru", or "arc": prompts asked once do not push out those asked again and again."""
    threads: int = 4
    """Threads that load blocks; one more stores them."""
    enable_kv_events: bool = False
    """Tell of stored blocks where vLLM publishes KV events (``--kv-events-config``)."""
    locality: str = "LOCAL"
    """What vLLM's events and filters call the tier: "LOCAL", or "REMOTE" for a folder on a network."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not Path(self.path).is_absolute():
            msg = f"path must be the absolute name of a folder, not {self.path!r}"
            raise OptionError(msg)
        check_flags(self, "encrypt", "direct", "enable_kv_events")
        check_texts(self, "namespace", "revision", "eviction_policy", "locality", may_be_none=("secret_file",))
        check_number("threads", self.threads, 1, most=64, is_whole=True)
        check_number("sync_seconds", self.sync_seconds, 0.1, most=60)
        check_number("bytes", self.bytes, 1, is_whole=True)
        if self.eviction_policy not in {"lru", "arc"}:
            msg = f'eviction_policy must be "lru" or "arc", not {self.eviction_policy!r}'
            raise OptionError(msg)
        if self.locality not in {"LOCAL", "REMOTE"}:
            msg = f'locality must be "LOCAL" or "REMOTE", not {self.locality!r}'
            raise OptionError(msg)
        if self.encrypt and self.secret_file is None:
            msg = "encrypt needs a key: set secret_file to a file made with `openssl rand -hex 32`"
            raise OptionError(msg)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> DurableConfig:
        """Read the options of a tier, without ``type``.

        Raises:
            OptionError: an unknown key (the message names the nearest one), a missing one, or a value out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                msg = f"unknown key {key!r} in the durable tier's options: {hint}"
                raise OptionError(msg)
        for key in ("path", "bytes"):
            if key not in options:
                example = '{"type": "durable", "path": "/var/cache/npu-kv", "bytes": "100GiB"}'
                msg = f"the durable tier needs {key}, as in {example}"
                raise OptionError(msg)
        return cls(**{**options, "bytes": parse_bytes(options["bytes"], "bytes", example="100GiB")})
