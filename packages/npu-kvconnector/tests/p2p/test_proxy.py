"""The proxy for disaggregated prefill: what it asks of which server, and what it says where one does not answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy is one of aiohttp's; vLLM brings it")

from aiohttp import test_utils, web

from npu_kvconnector.p2p.proxy import make_proxy

PATH = "/v1/completions"


async def ask(data: bytes, *, is_up: bool = True, prefilled: Any = None) -> tuple[int, Any, list[Any]]:
    """Send a request through a proxy; return status, answer and what the prefill server was asked."""
    asked: list[Any] = []

    async def prefill(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"kv_transfer_params": {"from": "prefill"}} if prefilled is None else prefilled)

    async def decode(request: web.Request) -> web.Response:
        return web.json_response({"got": await request.json()})

    urls = []
    servers = []
    for handler in (prefill, decode):
        application = web.Application()
        application.router.add_post(PATH, handler)
        servers.append(test_utils.TestServer(application))
        await servers[-1].start_server()
        urls.append(str(servers[-1].make_url("")).rstrip("/"))
    if not is_up:
        await servers[1].close()
    async with test_utils.TestClient(test_utils.TestServer(make_proxy(urls[:1], urls[1:]))) as client:
        answer = await client.post(PATH, data=data, headers={"Content-Type": "application/json"})
        result = answer.status, json.loads(await answer.text()), asked
    for server in servers:
        await server.close()
    return result


def test_a_prompt_is_computed_once_whatever_is_asked_of_the_answer() -> None:
    more = {"n": 8, "best_of": 8, "echo": True, "logprobs": 5, "prompt_logprobs": 20, "stream_options": {"x": 1}}
    body = {"prompt": "a", "max_tokens": 5, "stream": True, **more}
    status, answer, [asked] = asyncio.run(ask(json.dumps(body).encode()))
    assert status == 200
    assert answer["got"] == body | {"kv_transfer_params": {"from": "prefill"}}
    assert asked["n"] == asked["max_tokens"] == 1
    assert not asked["stream"]
    assert asked.keys().isdisjoint(more.keys() - {"n"})


@pytest.mark.parametrize("data", [b"{nope", b"[1, 2]", b'"x"', b"", b"\xff"])
def test_what_is_no_object_is_a_bad_request(data: bytes) -> None:
    status, answer, asked = asyncio.run(ask(data))
    assert (status, asked) == (400, [])
    assert "JSON object" in answer["error"]["message"]


def test_a_server_that_cannot_be_reached_is_a_bad_gateway() -> None:
    status, answer, _ = asyncio.run(ask(b'{"prompt": "a"}', is_up=False))
    assert status == 502
    assert "cannot be reached" in answer["error"]["message"]


@pytest.mark.parametrize("prefilled", [[1], {"kv_transfer_params": "x"}, {}])
def test_a_strange_prefill_server_costs_nothing(prefilled: Any) -> None:
    status, answer, _ = asyncio.run(ask(b'{"prompt": "a"}', prefilled=prefilled))
    assert (status, answer["got"]) == (200, {"prompt": "a"})
