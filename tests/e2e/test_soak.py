"""Minutes of mixed load leave a server as it was: answers, memory, cache and requests."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support.server import metric, serve_demo, until

if TYPE_CHECKING:
    from pathlib import Path

    from npu_platform.demo.server import Server

SECONDS = 240.0
CLIENTS = 6
GROWTH = 64 << 20
"""Bytes by which all processes of the server may grow after the first quarter: caches fill, leaks go on."""
QUESTION = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
def test_a_server_under_load_neither_grows_nor_forgets(tmp_path: Path) -> None:
    with serve_demo(tmp_path) as server:
        end = time.monotonic() + SECONDS
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, server, number, end) for number in range(CLIENTS)]
            time.sleep(SECONDS / 4)
            warm = resident(server)
            counts = [future.result() for future in clients]
        assert min(counts) > 10, counts
        assert until(lambda: metric(server, "vllm:num_requests_running") == 0)
        assert metric(server, "vllm:num_requests_waiting") == 0
        assert metric(server, "vllm:kv_cache_usage_perc") == 0
        assert resident(server) - warm < GROWTH
        assert ask(server, QUESTION).json()["choices"][0]["text"] == " Paris."


def client(server: Server, number: int, end: float) -> int:
    """Send completions of every size, hang up on some, and some that the server must refuse; return how many."""
    chance = random.Random(number)
    count = 0
    while time.monotonic() < end:
        kind = chance.random()
        if kind < 0.1:
            assert ask(server, {"prompt": "1 2 3", "max_tokens": -chance.randint(1, 9)}).status_code == 400
        elif kind < 0.3:
            hang_up(server, chance)
        else:
            numbers = " ".join(str(chance.randint(0, 9)) for _ in range(chance.randint(1, 300)))
            sampling = {"temperature": chance.choice([0, 1]), "max_tokens": chance.randint(1, 64), "ignore_eos": True}
            assert ask(server, {"prompt": numbers, **sampling}).status_code == 200
        count += 1
    return count


def hang_up(server: Server, chance: random.Random) -> None:
    """Leave in the middle of a stream."""
    body = {"model": server.name, "prompt": "1 2 3", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer,
    ):
        for number, _ in enumerate(answer.iter_lines()):
            if number > chance.randint(1, 20):
                return


def ask(server: Server, body: dict[str, Any]) -> httpx.Response:
    """Ask for a completion."""
    return httpx.post(f"{server.url}/v1/completions", json={"model": server.name, **body}, timeout=120, trust_env=False)


def resident(server: Server) -> int:
    """Return the bytes that the processes of the server keep in memory, shared ones counted once each."""
    process = psutil.Process(server.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])
