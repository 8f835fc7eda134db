"""A proxy for disaggregated prefill: each request goes to a prefill server for its prompt, then to a decode server.

``python -m npu_kvconnector.p2p.proxy --prefill http://p:8000 --decode http://d:8000 [--port 8080]``; several of either
are taken in turn. Where no prefill server answers, the decode server computes the prompt itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "make_proxy"]

logger = logging.getLogger("npu_kvconnector.proxy")

_PATHS = ("/v1/completions", "/v1/chat/completions")
_PREFILL: dict[str, Any] = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "stream": False, "n": 1}
_NOT_FOR_PREFILL = ("stream_options", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs")
"""What a client asks of the answer, which is the decode server's."""
_ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_LONGEST_BODY = 64 * 2**20


def make_proxy(prefill: Sequence[str], decode: Sequence[str], *, prefill_seconds: float = 300.0) -> web.Application:
    """Return the application in front of servers, given by their URLs.

    A client's own ``kv_transfer_params`` are dropped: only servers say where blocks are.
    """
    prefills, decodes = itertools.cycle(prefill), itertools.cycle(decode)
    client = web.AppKey("client", aiohttp.ClientSession)

    async def connect(application: web.Application) -> Any:
        application[client] = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        yield
        await application[client].close()

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        body.pop("kv_transfer_params", None)
        session, headers = request.app[client], _headers(request)
        params = await _prefill(session, next(prefills) + request.path, body, headers, prefill_seconds)
        whole = body if params is None else body | {"kv_transfer_params": params}
        return await _forward(request, session, "POST", next(decodes) + request.path, json=whole)

    async def other(request: web.Request) -> web.StreamResponse:
        url = next(decodes) + request.path_qs
        data = await request.read()
        return await _forward(request, request.app[client], request.method, url, data=data)

    application = web.Application(client_max_size=_LONGEST_BODY)
    application.cleanup_ctx.append(connect)
    for path in _PATHS:
        application.router.add_post(path, generate)
    application.router.add_route("*", "/{path:.*}", other)
    return application


def main(arguments: list[str] | None = None) -> None:
    """Run the proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="npu_kvconnector.p2p.proxy", description="Prefill here, decode there.")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="a prefill server; repeatable")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="a decode server; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="where to listen (%(default)s)")
    options = parser.parse_args(arguments)
    web.run_app(make_proxy(options.prefill, options.decode), host=options.host, port=options.port)


async def _prefill(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], seconds: float
) -> dict[str, Any] | None:
    """Have the prompt computed; return the parameters to read its blocks with, or None where that failed."""
    asked = body | _PREFILL | {"kv_transfer_params": _ASK}
    for name in _NOT_FOR_PREFILL:
        asked.pop(name, None)
    if "max_completion_tokens" not in body:
        del asked["max_completion_tokens"]  # completions have no such field
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with session.post(url, json=asked, headers=headers, timeout=timeout) as answer:
            if answer.status != web.HTTPOk.status_code:
                return None  # what is wrong with the request, the decode server will say
            answered = await answer.json()
            params = answered.get("kv_transfer_params") if isinstance(answered, dict) else None
            return params if isinstance(params, dict) else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        logger.warning("%s did not compute a prompt (%s)", url, type(error).__name__)
        return None


async def _body(request: web.Request) -> dict[str, Any]:
    """Return a request's JSON object.

    Raises:
        HTTPBadRequest: it is none.
    """
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text=_error("the body must be a JSON object"), content_type="application/json")
    return body


async def _forward(
    request: web.Request, session: aiohttp.ClientSession, method: str, url: str, **sent: Any
) -> web.StreamResponse:
    """Ask a server and send its answer to the client.

    Raises:
        HTTPBadGateway: the server cannot be reached.
    """
    try:
        answer = await session.request(method, url, headers=_headers(request), **sent)
    except aiohttp.ClientError as error:
        logger.warning("%s cannot be reached (%s)", url, type(error).__name__)
        text = _error("the decode server cannot be reached")
        raise web.HTTPBadGateway(text=text, content_type="application/json") from error
    async with answer:
        return await _pass_on(request, answer)


def _error(message: str) -> str:
    return json.dumps({"error": {"message": message}})


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Send a server's answer to the client as it comes."""
    response = web.StreamResponse(status=answer.status)
    if "Content-Type" in answer.headers:
        response.headers["Content-Type"] = answer.headers["Content-Type"]
    await response.prepare(request)
    async for data in answer.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


def _headers(request: web.Request) -> dict[str, str]:
    kept = ("Authorization", "X-Request-Id", "Content-Type")
    return {name: request.headers[name] for name in kept if name in request.headers}


if __name__ == "__main__":
    main()
