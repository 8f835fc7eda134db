"""One engine on two hosts: two of vLLM's nodes, in namespaces that have a name of their own and so share no memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from npu_platform.demo.server import Server
from tests.support.clients import ask_until_it_fails
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.server import READY_TIMEOUT, metric, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20))


def in_namespaces(*kinds: str) -> list[str]:
    """Return what runs a command in new namespaces; skips where that takes rights that this user has not."""
    command = ["unshare", *kinds, "--"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("unshare needs CAP_SYS_ADMIN")
    return command


@contextlib.contextmanager
def two_hosts(folder: Path, *arguments: str) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Serve the demo model on this host and on one called "second", each of which starts half of the ranks."""
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(get_open_port()), *SMALL, *arguments)
    environ = os.environ | {"NPU_SIMULATOR_DEVICES": "1", "NPU_SIMULATOR_MEMORY": "1GiB", "VLLM_HOST_IP": "127.0.0.1"}
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--headless"]
    second = [
        *in_namespaces("--uts"),
        "sh",
        "-c",
        'hostname second && exec "$@"',
        "sh",
        *serve,
        *nodes,
        "--node-rank",
        "1",
    ]
    first = Server(MODEL, *nodes, "--node-rank", "0", log=folder / "first.log", environment=environ)
    with (folder / "second.log").open("wb") as log, first:
        process = subprocess.Popen(second, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            first.wait_until_ready(READY_TIMEOUT)
            yield first, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_hosts_serve(layout: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path, f"--{layout}-parallel-size", "2") as (server, second):
        answer = server.ask("/v1/completions", prompt="5 plus 6 is", temperature=0, max_tokens=8)
        assert answer["choices"][0]["text"] == " 11."
        log = server.log.read_text()
        assert "npuccl: ranks do not share memory" in log
        assert "second, npu:0" in log
        _dies(server, second)


def test_the_second_host_ends_with_the_first(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "--pipeline-parallel-size", "2") as (server, second):
        assert server.stop()
        assert second.wait(2 * PATIENCE) is not None


def _dies(server: Server, second: subprocess.Popen[bytes]) -> None:
    """The second host dies while clients wait: they are told, and the first one ends."""
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(ask_until_it_fails, server, stream=stream) for stream in (True, False)]
        assert until(lambda: metric(server, "vllm:generation_tokens_total") > 50, 60)
        os.killpg(second.pid, signal.SIGKILL)
        answers = [client.result(timeout=2 * PATIENCE) for client in told]
    assert all(EVENT in answer.text[-300:] for answer in answers), answers
    assert until(lambda: not server.processes_alive(), PATIENCE)
