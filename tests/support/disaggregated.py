"""Two servers of the demo model behind the proxy of disaggregated prefill, and what tests ask them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from tests.support.server import READY_TIMEOUT, demo_server, metric, until
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

__all__ = [
    "COMPLETIONS",
    "PREFILL",
    "PROMPTS",
    "TOKENS",
    "Pair",
    "ask",
    "hits",
    "prefill",
    "proxied",
    "serve_both",
    "text",
]

COMPLETIONS = "/v1/completions"
PROMPTS = [" ".join(str((7 * i + j) % 90 + 10) for j in range(120)) for i in range(4)]
TOKENS = 24
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair(NamedTuple):
    """A prefill server, a decode server, and the proxy's URL."""

    prefill: Server
    decode: Server
    proxy: str
    ports: tuple[int, ...] = ()
    """Of their tiers."""


@contextlib.contextmanager
def serve_both(folder: Path, prefill: list[str], decode: list[str], *environs: dict[str, str]) -> Iterator[Pair]:
    """Start both servers at a time, with these arguments and environments, and the proxy."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name, arguments, environ in zip(("prefill", "decode"), (prefill, decode), environs, strict=True):
            place = folder / name
            place.mkdir()
            servers.append(stack.enter_context(demo_server(place, *arguments, **environ)))
        for server in servers:
            server.wait_until_ready(READY_TIMEOUT)
        yield Pair(*servers, stack.enter_context(proxied(*servers)))


@contextlib.contextmanager
def proxied(prefill: Server, decode: Server) -> Iterator[str]:
    port = free_port()
    servers = ["--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "npu_kvconnector.p2p.proxy", *servers])
    url = f"http://127.0.0.1:{port}"
    try:
        assert until(lambda: _answers(f"{url}/health"), 60)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def ask(url: str, model: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more
    answer = httpx.post(url + COMPLETIONS, json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def text(server: Server, prompt: str, **more: Any) -> str:
    return str(ask(server.url, server.name, prompt, **more)["choices"][0]["text"])


def prefill(pair: Pair, prompt: str) -> dict[str, Any]:
    """Have a prompt computed, and return where its blocks are."""
    answer = ask(pair.prefill.url, pair.prefill.name, prompt, max_tokens=1, kv_transfer_params=PREFILL)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def hits(server: Server) -> float:
    return metric(server, "vllm:external_prefix_cache_hits_total")
