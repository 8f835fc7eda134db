"""P2PConfig: the options of NPUNixlConnector beside those of vLLM's NixlConnector."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import TYPE_CHECKING, Any

from npu_kvconnector.checks import check_number, check_texts
from npu_kvconnector.errors import OptionError
from npu_kvconnector.secret_file import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["P2PConfig"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class P2PConfig:
    """What keeps strangers out, and how long to wait."""

    secret_file: str
    """A file of at least 16 bytes that the servers and nobody else can read; tickets and keys derive from it."""
    peers: tuple[str, ...] = ()
    """Servers to read from: "host", "host:port" or a network such as "10.0.1.0/24"; ports are of the side channel."""
    deadline: float = 5.0
    """Seconds for a handshake, and for the blocks of a request; then the prompt is computed here."""

    def __post_init__(self) -> None:
        check_texts(self, "secret_file")
        check_number("deadline", self.deadline, 0.001)
        if not all(isinstance(peer, str) and peer for peer in self.peers):
            msg = f'peers must be a list of names such as "10.0.0.7:5600" or "10.0.1.0/24", not {self.peers!r}'
            raise OptionError(msg)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any], *, is_consumer: bool) -> P2PConfig:
        """Read our keys of ``kv_connector_extra_config``; the others are NixlConnector's.

        Raises:
            OptionError: no secret, no peers where they are needed, a value out of range, or an option of NixlConnector
                that tickets do not cover.
        """
        if extra_config.get("bidirectional_kv_xfer"):
            msg = "NPUNixlConnector reads from prefill servers only: leave out bidirectional_kv_xfer"
            raise OptionError(msg)
        if "secret_file" not in extra_config:
            msg = "NPUNixlConnector needs secret_file, the same on all servers: openssl rand -hex 32 > F; chmod 600 F"
            raise OptionError(msg)
        peers = extra_config.get("peers", ())
        if not isinstance(peers, (list, tuple)) or (is_consumer and not peers):
            msg = 'peers must list the servers to read from, such as ["10.0.0.7:5600"] or ["10.0.1.0/24"]'
            raise OptionError(msg)
        values = {name: extra_config[name] for name in ("secret_file", "deadline") if name in extra_config}
        return cls(peers=tuple(peers), **values)

    def secret(self) -> bytes:
        """Return the secret. Raises OptionError where the file is not there, too short, or readable for others."""
        return read_secret(self.secret_file)

    def allows(self, host: str, port: int) -> bool:
        """Whether blocks may be read from a server."""
        return any(_matches(peer, host, port) for peer in self.peers)


def _matches(peer: str, host: str, port: int) -> bool:
    if peer in (host, f"{host}:{port}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(peer, strict=False)
    except ValueError:
        return False
