"""Servers behind vLLM's router, asked by ``vllm bench serve``, and what came of every request.

The router (https://github.com/vllm-project/router) is a program of its own: ``nox -s router`` installs it for its tests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import httpx
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from tests.support.server import until
from tests.support.vllm_process import start_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server
    from tests.support.forks import Fork

__all__ = ["Client", "Request", "rate", "router"]

TOKENS_IN, TOKENS_OUT = 64, 128
# A server that is gone is asked again 12 times within 4 s, and left out after its second silence, a second apart.
PATIENT = (
    *("--retry-max-retries", "12", "--retry-max-backoff-ms", "500"),
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "2"),
)


@dataclass(frozen=True)
class Request:
    """One request: when it began and each of its pieces came (seconds, ``time.perf_counter``), tokens, and its error."""

    began: float
    pieces: tuple[float, ...]
    tokens: int
    error: str

    @property
    def whole(self) -> bool:
        """Whether all came that was asked for."""
        return not self.error and self.tokens == TOKENS_OUT


@contextlib.contextmanager
def router(servers: list[Server], folder: Path) -> Iterator[str]:
    """Put vLLM's router before some servers, each in turn, until the block ends; yield its address."""
    program = shutil.which("vllm-router")
    assert program is not None, "nox -s router"
    port = get_open_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(get_open_port())]
    command += ["--policy", "round_robin", *PATIENT, "--worker-urls", *(server.url for server in servers)]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        assert until(lambda: _answers(url), 60), (folder / "router.log").read_text()[-3000:]
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Client:
    """``vllm bench serve`` with so many requests, of which so many at a time; a context manager, in which it runs."""

    def __init__(self, url: str, requests: int, at_a_time: int, folder: Path) -> None:
        self._file = folder / "bench.json"
        self._log = folder / "bench.log"
        self._arguments = ["--base-url", url, "--backend", "openai", "--model", "demo", "--tokenizer", str(MODEL)]
        self._arguments += ["--dataset-name", "random", "--random-input-len", str(TOKENS_IN), "--ignore-eos"]
        self._arguments += ["--random-output-len", str(TOKENS_OUT), "--num-prompts", str(requests), "--disable-tqdm"]
        self._arguments += ["--max-concurrency", str(at_a_time), "--temperature", "0", "--save-result"]
        self._arguments += ["--save-detailed", "--result-filename", str(self._file)]

    def __enter__(self) -> Self:
        """Start it."""
        environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            arguments = ("vllm.entrypoints.cli.main", "bench", "serve", *self._arguments)
            self._process: Fork = start_module(*arguments, environ=environ, output=log)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.kill()

    def requests(self, timeout: float) -> list[Request]:
        """Wait for its end and return what it saw of each request."""
        assert self._process.wait(timeout) == 0, self._log.read_text(errors="replace")[-3000:]
        said = json.loads(self._file.read_text())
        fields = ("start_times", "ttfts", "itls", "output_lens", "errors")
        return [_request(*one) for one in zip(*(said[field] for field in fields), strict=True)]


def rate(requests: list[Request], begin: float, end: float) -> float:
    """Return the tokens a second that came between two times."""
    came = 0.0
    for request in requests:
        share = max(1.0, request.tokens / max(1, len(request.pieces)))  # of a piece, which may hold several
        came += share * sum(begin <= piece < end for piece in request.pieces)
    return came / (end - begin)


def _request(began: float, first: float, gaps: list[float], tokens: int, error: str) -> Request:
    pieces = itertools.accumulate([began + first, *gaps]) if first else ()
    return Request(began, tuple(pieces), tokens, error)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    return False
