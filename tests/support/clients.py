"""Clients that keep asking a server while something happens to it, and say what they saw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx

from tests.support.faults_page import EVENT
from tests.support.server import LONG

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

__all__ = ["Answer", "ask", "ask_until_it_fails", "health", "process_of"]


class Answer(NamedTuple):
    """What a client got: the status, None where there was no connection any more, and the text."""

    status: int | None
    text: str


def ask_until_it_fails(server: Server, *, stream: bool) -> Answer:
    """Return the first answer that is none."""
    while True:
        answer = ask(server, stream=stream)
        if answer.status != httpx.codes.OK or EVENT in answer.text[-300:]:
            return answer


def ask(server: Server, *, stream: bool) -> Answer:
    """Ask for a long answer and return what came."""
    body = {"model": server.name, "stream": stream, **LONG}
    text, status = "", None
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            status = answer.status_code
            for piece in answer.iter_text():
                text += piece
    except httpx.HTTPError as error:
        return Answer(None, f"{text}\n{error!r}")
    return Answer(status, text)


def health(server: Server) -> int | None:
    """Return the status of /health; None where nobody answers."""
    try:
        return httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def process_of(server: Server, name: str) -> int:
    """Return the server's process whose title has this name."""
    for pid in server.processes_alive():
        if name in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    msg = f"no process {name} among {server.processes_alive()}"
    raise AssertionError(msg)
