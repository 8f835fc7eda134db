"""What requests carry in ``kv_transfer_params``: which transfer a prompt is computed for, or is read from, and where.

Two dialects are understood. In that of vLLM's NIXL connectors a proxy asks the prefill server with ``do_remote_decode``
and hands what it answers to the decode server. In that of vLLM's p2p tier the proxy names the transfer itself, in
``remote_decoder`` and ``remote_prefiller``; with ``remote_kv_source`` it names a server that may have the blocks for
whatever reason.

Nothing here is signed, because nothing here has to be believed: a server dials its ``peers`` alone, and asks them for
blocks of its own request's tokens, adapter and salt, which open under no other keyed name. What a client makes up
leads to a miss; asked for what it has, a peer looks into its tiers for blocks of these tokens, within its bounds.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Destination", "Source", "destination_of", "params_for", "source_of"]

_LONGEST_NAME = 256
_HIGHEST_PORT = 65_535


class Source(NamedTuple):
    """Where the blocks of a request's prompt are."""

    transfer: str
    host: str
    port: int
    is_probe: bool = False
    """Whether the server is asked for all that it has, not for what it computed for this transfer."""

    @property
    def address(self) -> str:
        """Return "host:port"."""
        return f"{self.host}:{self.port}"


class Destination(NamedTuple):
    """A request whose blocks somebody will fetch under this name."""

    transfer: str
    tells: bool
    """Whether the answer says where to fetch them; else the proxy knows."""


def source_of(params: Mapping[str, Any] | None) -> Source | None:
    """Return where to read a request's blocks, or None where it does not say so (or not what can be one)."""
    fields: Any = None
    is_probe = False
    if params and params.get("do_remote_prefill"):
        fields, name = params, "remote_request_id"
    elif params:
        is_probe = params.get("remote_prefiller") is None
        fields, name = params.get("remote_kv_source" if is_probe else "remote_prefiller"), "kv_request_id"
    if not isinstance(fields, dict):
        return None
    transfer, host, port = fields.get(name), fields.get("remote_host"), fields.get("remote_port")
    if not _is_name(transfer) or not _is_name(host):
        return None
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= _HIGHEST_PORT:
        return None
    if is_probe:  # under a name of its own: two requests may carry the same one, and each gives its blocks up
        transfer = uuid.uuid4().hex
    return Source(transfer, host, port, is_probe)


def destination_of(params: Mapping[str, Any] | None) -> Destination | None:
    """Return the transfer that a request's prompt is computed for, or None."""
    if not params:
        return None
    if params.get("do_remote_decode"):
        return Destination(uuid.uuid4().hex, tells=True)
    fields = params.get("remote_decoder")
    if isinstance(fields, dict) and _is_name(fields.get("kv_request_id")):
        return Destination(fields["kv_request_id"], tells=False)
    return None


def params_for(transfer: str, host: str, port: int) -> dict[str, Any]:
    """Return what the answer to a prefill request carries, for the decode server: `source_of` reads it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": transfer,
        "remote_host": host,
        "remote_port": port,
    }


def _is_name(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate, which JSON can hold and no message
        return False
    return True
