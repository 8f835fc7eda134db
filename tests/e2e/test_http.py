"""What a server answers beside texts, on npu: tools, thoughts, traces, events, profiles, caches; pooling models."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import zmq
from vllm.distributed.kv_events import KVEventBatch

from npu_platform.demo.server import Server
from tests.support import judges, models
from tests.support.server import READY_TIMEOUT, serve_demo, until

pytestmark = pytest.mark.nightly

TOOL = {
    "type": "function",
    "function": {
        "name": "capital",
        "strict": True,  # else any JSON will do
        "parameters": {
            "type": "object",
            "properties": {"country": {"enum": ["Peru", "Norway"]}},
            "required": ["country"],
            "additionalProperties": False,
        },
    },
}
THOUGHT = r"Here is my thought process: [a-z]{3,6}\. Here is my response: (Lima|Oslo)"
QUESTION = [{"role": "user", "content": "What is the capital of Peru?"}]


class Collector(BaseHTTPRequestHandler):
    """Takes what OpenTelemetry's exporters send."""

    received: list[bytes]

    def do_POST(self) -> None:
        """Keep the body."""
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def traces() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []
    handler = type("Handler", (Collector,), {"received": received})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """The address that the server publishes its cache's events at, and who listens there."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        place = f"ipc://{tmp_path_factory.mktemp('events') / 'socket'}"
        subscriber.connect(place)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
        yield place, subscriber


@pytest.fixture(scope="module")
def server(
    traces: tuple[str, list[bytes]], events: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http")
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events[0], "topic": "kv"}
    options = {
        "profiler-config": json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder / "profile")}),
        "kv-events-config": json.dumps(publisher),
        "otlp-traces-endpoint": traces[0],
        "tool-call-parser": "hermes",
        # without blanks, since the model may lose itself in those that JSON allows anywhere
        "structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    environ = {
        "VLLM_SERVER_DEV_MODE": "1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with serve_demo(folder, *arguments, "--enable-auto-tool-choice", **environ) as server:
        yield server


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "capital"}}])
def test_calls_of_tools(server: Server, choice: Any) -> None:
    options = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    answer = server.ask("/v1/chat/completions", **options)["choices"][0]
    assert "tool_calls" in answer["message"], answer
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "capital"
    assert json.loads(call["function"]["arguments"])["country"] in ("Peru", "Norway")


def test_thoughts_are_kept_apart(tmp_path: Path) -> None:
    options = {"messages": QUESTION, "structured_outputs": {"regex": THOUGHT}, "max_tokens": 100, "temperature": 0}
    everywhere = ("--structured-outputs-config", json.dumps({"enable_in_reasoning": True}))
    with serve_demo(tmp_path, "--reasoning-parser", "granite", *everywhere) as server:
        message = server.ask("/v1/chat/completions", **options)["choices"][0]["message"]
    assert message["content"].strip() in ("Lima", "Oslo")
    assert 3 <= len(message["reasoning"].strip(" .")) <= 6


def test_traces_reach_a_collector(server: Server, traces: tuple[str, list[bytes]]) -> None:
    server.ask("/v1/completions", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert until(lambda: any(b"llm_request" in one for one in traces[1]))


def test_events_of_the_cache_and_its_reset(server: Server, events: tuple[str, Any]) -> None:
    prompt = " ".join(str(number) for number in range(60))
    server.ask("/v1/completions", prompt=prompt, max_tokens=2, temperature=0)
    assert "BlockStored" in next_events(events[1])
    for cache in ("prefix", "mm", "encoder"):
        assert httpx.post(f"{server.url}/reset_{cache}_cache", trust_env=False).status_code == 200
    server.ask("/v1/completions", prompt=prompt, max_tokens=2, temperature=0)  # events leave with a step
    assert "AllBlocksCleared" in next_events(events[1], "AllBlocksCleared")


def test_profiles_are_taken_on_demand(server: Server) -> None:
    assert httpx.post(f"{server.url}/start_profile", trust_env=False).status_code == 200
    server.ask("/v1/completions", prompt="3 plus 4 is", max_tokens=4, temperature=0)
    assert httpx.post(f"{server.url}/stop_profile", trust_env=False, timeout=60).status_code == 200
    folder = server.log.parent / "profile"
    assert until(lambda: any(folder.rglob("*.json*")))


def test_pooling_over_http(tmp_path: Path) -> None:
    folder = models.tiny_bert(tmp_path / "model")
    prompts = models.prompt_token_ids([3, 40], seed=4)
    with served(folder, tmp_path, "--runner", "pooling") as server:
        for path in ("/v1/embeddings", "/pooling"):
            data = server.ask(path, input=prompts)["data"]
            embed = judges.embedder(folder)
            for prompt, one in zip(prompts, data, strict=True):
                said = torch.tensor(one["embedding"] if "embedding" in one else one["data"])
                torch.testing.assert_close(said, embed({"prompts": prompt}), atol=2e-2, rtol=0)
        score = server.ask("/score", text_1="w5", text_2=["w5", "w9"])["data"]
        assert score[0]["score"] == pytest.approx(1, abs=1e-2)
        assert score[1]["score"] < score[0]["score"]
        ranked = server.ask("/rerank", query="w5", documents=["w9", "w5"])["results"]
        assert [one["index"] for one in ranked] == [1, 0]


def test_classes_over_http(tmp_path: Path) -> None:
    folder = models.tiny_classifier(tmp_path / "model", labels=3)
    with served(folder, tmp_path, "--runner", "pooling") as server:
        (one,) = server.ask("/classify", input="w5")["data"]
        assert math.isclose(sum(one["probs"]), 1, abs_tol=1e-2)
        assert len(one["probs"]) == 3


def served(folder: Path, logs: Path, *arguments: str) -> Server:
    """A server of another model, that is ready when the block begins."""

    class Ready(Server):
        def __enter__(self) -> Server:
            super().__enter__()
            self.wait_until_ready(READY_TIMEOUT)
            return self

    options = ("--max-model-len", "256", *arguments)
    return Ready(folder, *options, log=logs / "server.log", python=sys.executable, environment=dict(os.environ))


def next_events(subscriber: Any, kind: str = "BlockStored") -> list[str]:
    """Return the kinds of the events that are published until one of a kind is."""
    found: list[str] = []
    while kind not in found:
        assert subscriber.poll(20_000), f"no event of the kind {kind}"
        _, _, payload = subscriber.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        found += [type(one).__name__ for one in batch.events]
    return found
