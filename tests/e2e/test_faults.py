"""What clients and operators see when the device or the engine fails under load, and that a restart serves."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from tests.support.server import LONG, metric, serve_demo, until

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

CLIENTS = 8  # half of them stream
PATIENCE = 20.0
"""Seconds within which all must know and the server be gone: every 5 vLLM looks whether its engine lives."""

# One launch for each of three layers of a step: by then all clients have got some of their 1,900 tokens.
ATTENTION = "kernel=npu_ops::paged_attention"
FAULTS = {
    "kernel": (f"{ATTENTION}@3000", "kernel npu_ops::paged_attention failed on npu:0: fault on demand"),
    "lost": (f"lost@3000:{ATTENTION}", "npu: device npu:0 is lost"),
    "out-of-memory": ("oom@20000", "NPU out of memory"),
}
NIGHTLY = ("lost", "out-of-memory")


class Answer(NamedTuple):
    """What a client got: the status, None where there was no connection any more, and the text."""

    status: int | None
    text: str


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in FAULTS]
)
def test_a_fault_of_the_device_ends_the_server_with_its_words(name: str, tmp_path: Path) -> None:
    fault, words = FAULTS[name]
    with serve_demo(tmp_path, NPU_DEBUG=fault) as server:
        fails_in_the_open(server)
        assert words in server.log.read_text(errors="replace")


def test_a_restart_serves_until_its_engine_is_killed(tmp_path: Path) -> None:
    with serve_demo(tmp_path) as server:
        answer = server.ask("/v1/completions", prompt="5 plus 6 is", temperature=0, max_tokens=8)
        assert answer["choices"][0]["text"] == " 11."
        fails_in_the_open(server, kill="EngineCore")


@pytest.mark.nightly
def test_a_killed_worker_of_two_ends_the_server(tmp_path: Path) -> None:
    two = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "1GiB"}
    with serve_demo(tmp_path, "--tensor-parallel-size", "2", **two) as server:
        fails_in_the_open(server, kill="Worker_TP1")


def fails_in_the_open(server: Server, kill: str = "") -> None:
    """Put the server under load until it fails, of itself or by SIGKILL of a process, and assert that all are told."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, server, stream=number % 2 == 0) for number in range(CLIENTS)]
        if kill:
            assert until(lambda: metric(server, "vllm:generation_tokens_total") > 100)
            os.kill(process_of(server, kill), signal.SIGKILL)
        assert until(lambda: health(server) != 200, PATIENCE), "/health says that all is well"
        begin = time.monotonic()
        answers = [client.result() for client in clients]
    for number, (status, text) in enumerate(answers):
        streams = number % 2 == 0  # what streams has said 200 long ago, so the error is its last event
        assert status == (200 if streams else 500), text[-500:]
        assert "InternalServerError" in text[-300:], text[-500:]
    assert until(lambda: not server.processes_alive(), PATIENCE), "the server stays without its engine"
    assert time.monotonic() - begin < PATIENCE
    assert server.stop()
    # vLLM 0.32's API server ends with 0, as if it had been asked to: the log and /health tell of the error.
    assert server.exit_code == 0, server.log_tail()
    assert "EngineDeadError" in server.log.read_text(errors="replace")


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
