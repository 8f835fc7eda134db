"""One request of a replay over HTTP: sent as token ids to /v1/completions, its tokens timed as they come."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from npu_statlogger.errors import InputError
from npu_statlogger.tools.client import ERROR
from npu_statlogger.tools.request import Request

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answer", "Server"]

_SILENT = 600.0
"""Seconds without a byte after which a request has failed."""


@dataclass(frozen=True)
class Answer:
    """A request as the client saw it, the times between its chunks in seconds, and why it failed, if it did."""

    request: Request
    gaps: list[float]
    error: str = ""


class Server:
    """An OpenAI server of vLLM."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._session = session

    @classmethod
    async def find(cls, session: aiohttp.ClientSession, url: str, model: str | None) -> Self:
        """Ask for the models that are served.

        Raises:
            InputError: no server of this kind answers, or it does not serve `model`.
        """
        import aiohttp

        url = url.rstrip("/").removesuffix("/v1")
        try:
            async with session.get(f"{url}/v1/models") as response:
                response.raise_for_status()
                served = [entry["id"] for entry in (await response.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            msg = f"no OpenAI server answers at {url}/v1/models: {error}."
            raise InputError(msg) from error
        if not served or (model is not None and model not in served):
            msg = f"{url} does not serve {model!r}; it serves {', '.join(served) or 'nothing'}."
            raise InputError(msg)
        return cls(session, url, model or served[0])

    async def send(self, prompt: list[int], tokens: int) -> Answer:
        """Send a prompt of token ids and wait for exactly `tokens` tokens."""
        import aiohttp

        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrival, begin, moments, generated, error = time.time(), time.perf_counter(), [], 0, ""
        try:
            limits = aiohttp.ClientTimeout(total=None, sock_read=_SILENT)
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=limits) as response:
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:300]}"
                async for line in response.content:
                    event = _event(line)
                    error = error or str(event.get("error", ""))
                    if event.get("choices"):
                        moments.append(time.perf_counter())
                    generated = (event.get("usage") or {}).get("completion_tokens", generated)
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error and generated != tokens:
            error = f"{generated} tokens came, {tokens} were asked for"
        e2e = (moments[-1] if moments else time.perf_counter()) - begin
        ttft = moments[0] - begin if moments else None
        reason = ERROR if error else "length"
        request = Request.of_client(arrival, e2e, ttft, (len(prompt), generated), reason)
        return Answer(request, [b - a for a, b in pairwise(moments)], error)


def _event(line: bytes) -> dict[str, Any]:
    """Return what one line of a stream of server-sent events holds."""
    text = line.strip().removeprefix(b"data:").strip()
    return json.loads(text) if text.startswith(b"{") else {}
