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

from tests.support import faults_page
from tests.support.environments import ROOT
from tests.support.faults_page import EVENT, FAULTS, PATIENCE, STATUS
from tests.support.server import LONG, metric, serve_demo, until
from tests.support.vital_signs import shared_memory

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

CLIENTS = 8  # half of them stream


class Answer(NamedTuple):
    """What a client got: the status, None where there was no connection any more, and the text."""

    status: int | None
    text: str


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if fault.by_day else [pytest.mark.nightly]) for name, fault in FAULTS.items()]
)
def test_a_fault_is_told_to_everybody_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    environ = fault.environ | ({"NPU_DEBUG": fault.debug} if fault.debug else {})
    with serve_demo(tmp_path, *fault.arguments, **environ) as server:
        # of the tests but the first, this is a start after a fault
        answer = server.ask("/v1/completions", prompt="5 plus 6 is", temperature=0, max_tokens=8)
        assert answer["choices"][0]["text"] == " 11."
        held = shared_memory(server)
        fails_in_the_open(server, kill=fault.kill)
        assert fault.words in server.log.read_text(errors="replace")
    assert not [path for path in held if path.exists()]


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "user_guide" / "faults.md"
    assert page.read_text() == faults_page.text(), "python -m tests.support.faults_page > docs/user_guide/faults.md"


def fails_in_the_open(server: Server, kill: str = "") -> None:
    """Put the server under load until it fails, of itself or by SIGKILL of a process, and assert that all are told."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask_until_it_fails, server, stream=number % 2 == 0) for number in range(CLIENTS)]
        if kill:
            assert until(lambda: metric(server, "vllm:generation_tokens_total") > 100)
            os.kill(process_of(server, kill), signal.SIGKILL)
        assert until(lambda: health(server) != 200, PATIENCE), "/health says that all is well"
        begin = time.monotonic()
        answers = [client.result() for client in clients]
    # What streams has said 200 with its first token, and the error is its last event; before that it gets a status too.
    assert {status for status, _ in answers[::2]} in ({200}, {200, STATUS})
    assert {status for status, _ in answers[1::2]} == {STATUS}
    for _, text in answers:
        assert EVENT in text[-300:], text[-500:]
    assert until(lambda: not server.processes_alive(), PATIENCE), "the server stays without its engine"
    assert time.monotonic() - begin < PATIENCE
    assert server.stop()
    # vLLM 0.32's API server ends with 0, as if it had been asked to: the log and /health tell of the error.
    assert server.exit_code == 0, server.log_tail()
    assert "EngineDeadError" in server.log.read_text(errors="replace")


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
