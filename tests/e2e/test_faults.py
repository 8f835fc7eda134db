"""What clients and operators see when the device or the engine fails under load, and that a restart serves."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq
from vllm.utils.network_utils import zmq_socket_ctx

from tests.support import faults_page
from tests.support.clients import ask, ask_until_it_fails, health, process_of
from tests.support.environments import ROOT
from tests.support.faults_page import EVENT, FAULTS, PATIENCE, STATUS
from tests.support.server import metric, serve_demo, until
from tests.support.vital_signs import shared_memory

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

CLIENTS = 8  # half of them stream


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
        fails_in_the_open(server, fault.kill, fault.signal)
        assert fault.words in server.log.read_text(errors="replace")
    assert not [path for path in held if path.exists()]


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "user_guide" / "faults.md"
    assert page.read_text() == faults_page.text(), "python -m tests.support.faults_page > docs/user_guide/faults.md"


def test_vllm_loses_a_first_sigterm_while_an_engine_starts_as_the_page_says() -> None:
    """Its API server raises KeyboardInterrupt; where this fails the page has a sentence less."""
    try:
        with zmq_socket_ctx("inproc://start", zmq.ROUTER, bind=True):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pytest.fail("vLLM hears it: docs/user_guide/faults.md says that it does not")


@pytest.mark.nightly
def test_an_engine_that_is_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """It is ended after some seconds (:mod:`npu_platform.distributed.stop_watch`), and not before."""
    with serve_demo(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        client = pool.submit(ask, server, stream=True)
        assert until(lambda: metric(server, "vllm:generation_tokens_total") > 50)
        engine = process_of(server, "EngineCore")
        os.kill(engine, signal.SIGSTOP)
        assert not until(client.done, 2)
        assert health(server) == 200
        os.kill(engine, signal.SIGCONT)
        answer = client.result(60)
    assert answer.status == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_an_engine_whose_server_was_killed_ends(tmp_path: Path) -> None:
    """vLLM's own engine would wait for requests for ever, with all its memory."""
    with serve_demo(tmp_path) as server:
        held = shared_memory(server)
        os.kill(server.pid, signal.SIGKILL)
        assert until(lambda: not server.processes_alive(), PATIENCE), "processes stay without their server"
        assert f"process {server.pid} is gone, which started the engine" in server.log.read_text(errors="replace")
    assert not [path for path in held if path.exists()]


@pytest.mark.nightly
def test_an_ordinary_stop_of_several_ranks_leaves_no_shared_memory(tmp_path: Path) -> None:
    """vLLM kills an engine that waits for its ranks, with all that it started."""
    with serve_demo(tmp_path, "--tensor-parallel-size", "2", NPU_SIMULATOR_DEVICES="2") as server:
        held = shared_memory(server)
        assert [path for path in held if path.name.startswith("psm_")]
        assert server.stop()
    assert not [path for path in held if path.exists()]


def fails_in_the_open(server: Server, kill: str = "", number: int = signal.SIGKILL) -> None:
    """Put the server under load until it fails, of itself or by a signal to a process, and assert that all are told."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask_until_it_fails, server, stream=number % 2 == 0) for number in range(CLIENTS)]
        if kill:
            assert until(lambda: metric(server, "vllm:generation_tokens_total") > 100)
            os.kill(process_of(server, kill), number)
        assert until(lambda: health(server) != 200, PATIENCE), "/health says that all is well"
        begin = time.monotonic()
        answers = [client.result() for client in clients]
    # Whose answer was whole a moment before may ask again when nobody listens any more: that connection is refused.
    streams, others = (
        [one for one in some if "ConnectError" not in one.text] for some in (answers[::2], answers[1::2])
    )
    # What streams has said 200 with its first token, and the error is its last event; before that it gets a status too.
    assert {status for status, _ in streams} in ({200}, {200, STATUS}), streams
    assert {status for status, _ in others} == {STATUS}, others
    for _, text in streams + others:
        assert EVENT in text[-300:], text[-500:]
    assert until(lambda: not server.processes_alive(), PATIENCE), "the server stays without its engine"
    assert time.monotonic() - begin < PATIENCE
    assert server.stop()
    # vLLM 0.32's API server ends with 0, as if it had been asked to: the log and /health tell of the error.
    assert server.exit_code == 0, server.log_tail()
    assert "EngineDeadError" in server.log.read_text(errors="replace")
