"""Replaying a load against a server of HTTP that answers as vLLM does; tests/e2e replays against vLLM itself."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from npu_statlogger.cli import main
from npu_statlogger.tools.replay import Prompts, by_arrival
from npu_statlogger.tools.request import Request
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

web = pytest.importorskip("aiohttp.web")

GAP = 0.02


class Server:
    """Answers /v1/completions with as many chunks as tokens were asked for; keeps what came and when."""

    def __init__(self, fail: Callable[[dict], bool] = lambda body: False) -> None:
        self.bodies: list[tuple[float, dict[str, Any]]] = []
        self.fail = fail
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((time.time(), body))
        if self.fail(body):
            return web.json_response({"error": {"message": "prompt too long"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(GAP)
            await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    @contextmanager
    def serving(self) -> Iterator[Server]:
        loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start() -> web.AppRunner:
            application = web.Application()
            application.router.add_get("/v1/models", self.models)
            application.router.add_post("/v1/completions", self.complete)
            runner = web.AppRunner(application)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            return runner

        def run() -> None:
            asyncio.set_event_loop(loop)
            self.runner = loop.run_until_complete(start())
            loop.run_forever()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(30)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self.runner.cleanup(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@pytest.fixture
def recorded(tmp_path: Path, request_line: Callable, as_text: Callable) -> Path:
    """Twelve requests, 100 ms apart; their lines stand in the order of finishing."""
    lines = [
        request_line(
            arrival=1e9 + 0.1 * index,
            e2e=3.0 if index == 0 else 0.5,
            prompt_tokens=20 + index,
            cached_tokens=10 if index > 3 else 0,
            generation_tokens=1 + index % 4,
        )
        for index in range(12)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text(as_text(sorted(lines, key=lambda line: line.time)))
    return path


def test_times_and_lengths_are_those_that_were_recorded(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "replayed.jsonl"
    with Server().serving() as server:
        assert main(["replay", str(recorded), "--url", server.url, "-o", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["sent"], result["failed"], result["first_error"]) == (12, 0, "")
    bodies = [body for _, body in server.bodies]
    assert [len(body["prompt"]) for body in bodies] == [20 + index for index in range(12)]
    assert [body["max_tokens"] for body in bodies] == [1 + index % 4 for index in range(12)]
    assert {body["model"] for body in bodies} == {"tiny"}
    assert all(0 <= token < 1000 for body in bodies for token in body["prompt"])
    assert len({tuple(body["prompt"][:10]) for body in bodies[4:]}) == 1
    assert len({tuple(body["prompt"][:10]) for body in bodies[:4]}) == 4
    first = server.bodies[0][0]
    assert [when - first for when, _ in server.bodies] == pytest.approx([0.1 * index for index in range(12)], abs=0.09)
    replayed = result["replayed"]
    assert replayed["counters"]["generation_tokens"] == sum(1 + index % 4 for index in range(12))
    assert replayed["distributions"]["time_to_first_token_seconds"]["min"] >= GAP
    assert replayed["distributions"]["inter_token_latency_seconds"]["count"] == sum(index % 4 for index in range(12))
    assert result["recorded"]["distributions"]["e2e_request_latency_seconds"]["max"] == 3.0
    lines = list(Reading([out]).snapshots())
    assert sum(line.counters["request_success.length"] for line in lines) == 12
    assert main(["report", str(out)]) == 0


def test_a_load_may_be_faster_and_shorter(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server().serving() as server:
        assert main(["replay", str(recorded), "--url", f"{server.url}/v1", "--speed", "10", "--limit", "5"]) == 0
    assert len(server.bodies) == 5
    assert server.bodies[-1][0] - server.bodies[0][0] < 0.3
    text = capsys.readouterr().out
    assert "5 requests sent, 0 failed" in text
    assert "recorded" in text


def test_refused_requests_are_counted_and_the_first_is_told(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(fail=lambda body: len(body["prompt"]) > 29).serving() as server:
        assert main(["replay", str(recorded), "--url", server.url, "--speed", "10"]) == 3
    text = capsys.readouterr().out
    assert "12 requests sent, 2 failed" in text
    assert "HTTP 400" in text
    assert "prompt too long" in text


def test_no_server_and_no_such_model_are_clear_errors(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--url", "http://127.0.0.1:9"]) == 2
    assert "no OpenAI server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    with Server().serving() as server:
        assert main(["replay", str(recorded), "--url", server.url, "--model", "huge"]) == 2
    assert "does not serve 'huge'; it serves tiny" in capsys.readouterr().err


def test_files_without_requests_say_how_to_record_them(write_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(write_run(lines=1)), "--url", "http://127.0.0.1:9"]) == 2
    assert "NPU_STATLOGGER_REQUESTS" in capsys.readouterr().err


def test_a_sample_is_said_to_be_thinner(
    tmp_path: Path, request_line: Callable, as_text: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sampled.jsonl"
    path.write_text(as_text([request_line(weight=10.0), request_line(weight=10.0)]))
    with Server().serving() as server:
        assert main(["replay", str(path), "--url", server.url]) == 0
    assert capsys.readouterr().err.count("one of 10 requests was recorded") == 1


def test_replay_says_what_to_install(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["replay", str(recorded), "--url", "http://127.0.0.1:9"]) == 2
    assert "pip install 'npu-statlogger[replay]'" in capsys.readouterr().err


def test_requests_come_in_the_order_of_arrival_with_an_hour_of_memory() -> None:
    def request(arrival: float, e2e: float) -> Request:
        return Request(arrival, e2e, None, None, 1, 1, "stop")

    finished = sorted((request(float(at), 1.0 + at % 700) for at in range(0, 20_000, 7)), key=lambda each: each.end)
    pulled = 0

    def source() -> Iterator[Request]:
        nonlocal pulled
        for each in finished:
            pulled += 1
            yield each

    ordered = by_arrival(source())
    head = next(ordered)
    assert pulled < len(finished) // 3
    arrivals = [head.arrival, *(each.arrival for each in ordered)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == len(finished)


def test_prompts_are_the_same_for_the_same_seed(request_line: Callable) -> None:
    request = Request.of_line(request_line(prompt_tokens=50, cached_tokens=70))
    assert Prompts(100, 3).of(request) == Prompts(100, 3).of(request)
    assert len(Prompts(100, 3).of(request)) == 50
