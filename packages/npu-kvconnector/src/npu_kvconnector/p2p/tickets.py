"""Tickets: what makes ``kv_transfer_params`` trustworthy, which reach a server through its clients.

A prefill server signs where its blocks are, for which prompt, and until when; a decode server reads blocks for that
very prompt only, once. So a client can point a server neither at another host, nor at the blocks of another's prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SIGNED", "TICKET", "Tickets", "prompt_digest"]

TICKET = "npu_ticket"
"""Under this key the ticket is in ``kv_transfer_params``."""

SIGNED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_mode",
)
"""The parameters of vLLM's that say what is read, from where."""


class Tickets:
    """Signs and checks tickets with a key derived from the servers' secret; a ticket is good once in this process."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """Derive the key. Clocks of servers may differ by a good deal less than a ticket lasts."""
        self._key = hmac.digest(secret, b"tickets", "sha256")
        self._clock = clock
        self._used: dict[str, float] = {}

    def sign(self, params: Mapping[str, Any], *, prompt: str, seconds: float) -> dict[str, Any]:
        """Return the parameters with a ticket for the prompt of this digest, good for so many seconds."""
        ticket = {"prompt": prompt, "expires": self._clock() + seconds}
        return {**params, TICKET: {**ticket, "signature": self._signature(params, ticket)}}

    def refusal(self, params: Mapping[str, Any], *, prompt: str) -> str | None:
        """Return why the parameters may not be used for a prompt of this digest, or None; the ticket is used then."""
        ticket = params.get(TICKET)
        if not isinstance(ticket, dict):
            return "they carry no ticket"
        signature = ticket.get("signature")
        if not isinstance(signature, str) or not self._is_ours(signature, params, ticket):
            return "their ticket is not signed with our secret"
        now = self._clock()
        if ticket["expires"] < now:
            return "their ticket has expired"
        if ticket["prompt"] != prompt:
            return "their ticket is for another prompt"
        if signature in self._used:
            return "their ticket was used before"
        self._used = {used: until for used, until in self._used.items() if until >= now}
        self._used[signature] = ticket["expires"]
        return None

    def _is_ours(self, signature: str, params: Mapping[str, Any], ticket: Mapping[str, Any]) -> bool:
        try:
            expected = self._signature(params, ticket)
        except RecursionError:  # a client may nest lists deeper than we ever sign
            return False
        # A JSON string may hold half a surrogate pair, which has no bytes of its own.
        return hmac.compare_digest(signature.encode(errors="replace"), expected.encode())

    def _signature(self, params: Mapping[str, Any], ticket: Mapping[str, Any]) -> str:
        fields = [params.get(name) for name in SIGNED] + [ticket.get("prompt"), ticket.get("expires")]
        return hmac.digest(self._key, json.dumps(fields).encode(), "sha256").hex()


def prompt_digest(token_ids: Sequence[int], *others: str | None) -> str:
    """Return a digest of a prompt and of what else decides its blocks, such as the adapter and the salt."""
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    digest.update(json.dumps(others).encode())
    return digest.hexdigest()
