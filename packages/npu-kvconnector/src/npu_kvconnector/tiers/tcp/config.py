"""TcpConfig: the options of the p2p tier over TCP, parsed once and strictly; and which transport a p2p tier gets."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING, Any

from npu_kvconnector.checks import check_number, check_texts
from npu_kvconnector.config import parse_bytes
from npu_kvconnector.errors import OptionError
from npu_kvconnector.p2p.config import P2PConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TCP_TIER", "TRANSPORTS", "TcpConfig", "choose_transport", "has_nixl"]

TCP_TIER = "p2p_tcp"
"""The type under which vLLM's factory knows this tier, and its name in metrics and logs."""

TRANSPORTS = ("nixl", "tcp")

_OF_NIXL = ("backends",)
_OF_ANY_TIER = ("type", "transport", "guard", "backpressure")
_HIGHEST_PORT = 65_535
_LOAD_SECONDS = 30.0  # for all blocks of a prompt; each part of them has its deadline
_ANYWHERE = ("0.0.0.0", "::", "*")  # noqa: S104  # refused below
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "port": (int, 1, _HIGHEST_PORT),
    "bytes": (int, 1, math.inf),
    "pending_bytes": (int, 1, math.inf),
    "unbound_store_timeout_s": (float, 0.1, math.inf),
    "num_threads": (int, 1, 64),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TcpConfig:
    """The options; `host`, `port`, `num_threads` and `unbound_store_timeout_s` are those of vLLM's own p2p tier."""

    secret_file: str
    """A file of at least 16 bytes that the servers and nobody else can read; keys, names and seals derive from it."""
    peers: tuple[str, ...] = ()
    """Servers to read from: "host", "host:port" or a network such as "10.0.1.0/24"; none: this one computes prompts."""
    host: str | None = None
    """Where to listen, and what peers are told to dial; None: VLLM_P2P_SIDE_CHANNEL_HOST (localhost)."""
    port: int | None = None
    """The same; None: VLLM_P2P_SIDE_CHANNEL_PORT (5710). Replicas of data parallelism count on from it."""
    bytes: int = 2**30
    """Memory for blocks that peers have not fetched yet; what comes on top they compute."""
    unbound_store_timeout_s: float = 60.0
    """Seconds for which blocks are held that nobody asks for."""
    deadline: float = 5.0
    """Seconds that an answer may take, or a part of the blocks; what has not come by then is computed."""
    pending_bytes: int = 64 * 2**20
    """Bytes of blocks asked for at a time, of all peers together; and of those pinned in the host tier for peers."""
    num_threads: int = 2
    """Threads that encrypt and carry blocks, and connections to a peer; one moved 0.45 GB/s on a Xeon."""
    namespace: str = ""
    """Keeps blocks of one model apart, for instance of two teams."""
    revision: str = ""
    """What names the weights; by default they are sampled."""

    def __post_init__(self) -> None:
        _ = self.access  # checks secret_file, peers and deadline
        check_texts(self, "secret_file", "namespace", "revision", may_be_none=("host",))
        for name, (kind, lowest, most) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name != "port":
                check_number(name, value, lowest, most=most, is_whole=kind is int)
        if self.host in _ANYWHERE:
            msg = f"host is what peers are told to dial, which {self.host} is not: name this server's address"
            raise OptionError(msg)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TcpConfig:
        """Read the options of a tier, without ``type`` and what is of any tier.

        Raises:
            OptionError: no secret, an unknown key (the message names the nearest one), or a value out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key in _OF_NIXL:
                msg = f'{key} is of the p2p tier over nixl: leave it out, or say "transport": "nixl"'
                raise OptionError(msg)
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                msg = f"unknown key {key!r} in the options of the p2p tier over TCP: {hint}"
                raise OptionError(msg)
        if "secret_file" not in options:
            msg = (
                "the p2p tier over TCP needs secret_file, the same on all servers: openssl rand -hex 32 > F; "
                "chmod 600 F"
            )
            raise OptionError(msg)
        values = dict(options)
        for name in ("bytes", "pending_bytes"):
            if name in values:
                values[name] = parse_bytes(values[name], name)
        peers = values.get("peers", ())
        if not isinstance(peers, (list, tuple)):
            msg = f'peers must be a list of names such as "10.0.0.7:5710", not {peers!r}'
            raise OptionError(msg)
        values["peers"] = tuple(peers)
        return cls(**values)

    @property
    def access(self) -> P2PConfig:
        """Who may be read from, and the secret: the same rules as NPUNixlConnector's."""
        return P2PConfig(secret_file=self.secret_file, peers=self.peers, deadline=self.deadline)


def has_nixl() -> bool:
    """Whether vLLM finds NIXL, by its own way of looking."""
    from vllm.distributed.nixl_utils import NixlWrapper

    return NixlWrapper is not None


def choose_transport(tier: Mapping[str, Any], guard: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier of ``secondary_tiers`` as vLLM's factory is to read it; only p2p tiers are changed.

    A p2p tier goes over what its ``transport`` says: "nixl", which is vLLM's own tier, or "tcp", which is ours. Without
    one it is NIXL where that is installed, and else TCP. Nothing is exchanged silently: keys of the other transport are
    refused, the tier over TCP has another name in logs and metrics, and each says at start what it is.

    Args:
        tier: its options.
        guard: of all tiers; where neither it nor the tier's own says how long to wait, that follows from `deadline`.

    Raises:
        OptionError: the transport is unknown or not installed, or the options are not its own.
    """
    options = dict(tier)
    if options.get("type") not in ("p2p", TCP_TIER):
        return options
    transport = options.pop("transport", "tcp" if options["type"] == TCP_TIER else None)
    if transport is not None and transport not in TRANSPORTS:
        msg = f'transport of the p2p tier must be "nixl" or "tcp", not {transport!r}'
        raise OptionError(msg)
    is_there = has_nixl() if transport != "tcp" else False
    if transport == "nixl" and not is_there:
        msg = (
            'the p2p tier was asked for nixl, which is not installed: pip install "npu-kvconnector[nixl]", '
            'or say "transport": "tcp" with secret_file (and, on the decode server, peers)'
        )
        raise OptionError(msg)
    own = {name: value for name, value in options.items() if name not in _OF_ANY_TIER}
    if is_there:
        _refuse_keys_of_tcp(own)
        return options
    if transport is None and "secret_file" not in own:
        msg = (
            "the p2p tier goes over TCP where nixl is not installed, and needs secret_file then: add it (and, on the "
            'decode server, peers), or pip install "npu-kvconnector[nixl]"'
        )
        raise OptionError(msg)
    deadline = TcpConfig.parse(own).deadline
    patience = {"lookup_seconds": deadline + 1, "load_seconds": max(_LOAD_SECONDS, deadline + 1)}
    return options | {"type": TCP_TIER, "guard": {**patience, **guard, **options.get("guard", {})}}


def _refuse_keys_of_tcp(own: Mapping[str, Any]) -> None:
    """Refuse what vLLM's tier would read over without a word, such as a secret that it does not use."""
    shared = ("host", "port", "num_threads", "unbound_store_timeout_s")
    names = [field.name for field in dataclasses.fields(TcpConfig) if field.name not in shared]
    wrong = [name for name in own if name in names]
    if wrong:
        msg = f'{wrong[0]} is of the p2p tier over TCP, and nixl is used here: say "transport": "tcp", or leave it out'
        raise OptionError(msg)
