"""Two servers behind vLLM's router under ``vllm bench serve``: one is killed, and a new one takes its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest

from npu_platform.demo import MODEL
from tests.support.balanced import Client, rate, router
from tests.support.server import READY_TIMEOUT, metric, server_of, until

if TYPE_CHECKING:
    from pathlib import Path

    from npu_platform.demo.server import Server

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("vllm-router") is None, reason="vLLM's router is not installed: nox -s router"),
]
REQUESTS, AT_A_TIME = 3200, 8  # of which a server that starts again sees the last, also where it takes a minute
SOME = 200
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--no-enable-prefix-caching")
ENVIRON = {"NPU_SIMULATOR_MEMORY": "1GiB", "NPU_NUM_THREADS": "1"}


def answered(server: Server) -> float:
    return metric(server, "vllm:request_success_total")


def test_no_request_is_lost_when_a_server_is_killed(tmp_path: Path) -> None:
    """Those that were on it are told; all others are answered whole, by the other and by the one that is started again."""
    with contextlib.ExitStack() as stack:
        one, other = servers = [
            stack.enter_context(server_of(MODEL, tmp_path, *SMALL, log=f"{name}.log", **ENVIRON))
            for name in ("one", "other")
        ]
        for server in servers:
            server.wait_until_ready(READY_TIMEOUT)
        client = Client(stack.enter_context(router(servers, tmp_path)), REQUESTS, AT_A_TIME, tmp_path)
        with client:
            assert until(lambda: answered(one) + answered(other) > SOME, 300)
            killed = time.perf_counter()
            os.killpg(other.pid, signal.SIGKILL)
            other.stop()
            before = answered(one)
            assert until(lambda: answered(one) > before + SOME, 300)
            restarted = time.perf_counter()
            stack.enter_context(other)
            other.wait_until_ready(READY_TIMEOUT)
            back = time.perf_counter()
            requests = client.requests(900)
        assert answered(other) > 0
    told = [request for request in requests if request.error]
    assert len(requests) == REQUESTS
    assert all(request.whole or request.error for request in requests)
    assert len(told) <= AT_A_TIME
    assert all(request.began < killed for request in told)
    begin, end = (pick(piece for request in requests for piece in request.pieces) for pick in (min, max))
    phases = {"two servers": (begin, killed), "one": (killed, restarted), "two again": (back, end)}
    print(f"{len(told)} told;", *(f"{name}: {rate(requests, *times):.0f} tok/s;" for name, times in phases.items()))
