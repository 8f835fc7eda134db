"""One engine on two hosts: two of vLLM's nodes, the second with a name and a network of its own, so that they share no memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from npu_platform.demo.server import Server, ServerError
from tests.support.clients import ask_until_it_fails
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.network import Network, second_network
from tests.support.server import READY_TIMEOUT, metric, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20))


@pytest.fixture
def network() -> Iterator[Network]:
    """Make a network namespace; skips where that takes rights that this user has not."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(second_network())
        except PermissionError as error:
            pytest.skip(str(error))
        yield made


@contextlib.contextmanager
def two_hosts(
    folder: Path, network: Network, *arguments: str, **of_second: str
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Serve the demo model on this host and on one called "second", each of which starts half of the ranks.

    `of_second`: further variables of the second's.
    """
    nodes = ("--nnodes", "2", "--master-addr", network.here, "--master-port", str(get_open_port()), *SMALL, *arguments)
    environ = os.environ | {"NPU_SIMULATOR_DEVICES": "1", "NPU_SIMULATOR_MEMORY": "1GiB"}
    there, here = (environ | network.environ(second=second) for second in (True, False))
    # Processes of its own, too: those of the first host do not see them.
    apart = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    inside = ["ip", "netns", "exec", network.name, *apart, "sh", "-c", 'hostname second && exec "$@"', "sh"]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--headless"]
    second = [*inside, *serve, *nodes, "--node-rank", "1"]
    first = Server(MODEL, *nodes, "--node-rank", "0", log=folder / "first.log", environment=here)
    with (folder / "second.log").open("wb") as log, first:
        process = subprocess.Popen(
            second, env=there | of_second, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            first.wait_until_ready(READY_TIMEOUT)
            yield first, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_hosts_serve(layout: str, network: Network, tmp_path: Path) -> None:
    with two_hosts(tmp_path, network, f"--{layout}-parallel-size", "2") as (server, second):
        answer = server.ask("/v1/completions", prompt="5 plus 6 is", temperature=0, max_tokens=8)
        assert answer["choices"][0]["text"] == " 11."
        log = server.log.read_text()
        assert "npuccl: ranks do not share memory" in log
        assert "second, npu:0" in log
        _dies(server, lambda: os.killpg(second.pid, signal.SIGKILL))


def test_a_host_without_power_is_given_up(network: Network, tmp_path: Path) -> None:
    """Nothing comes from it any more, not even the end of its connections."""
    with two_hosts(tmp_path, network, "--tensor-parallel-size", "2") as (server, _):
        _dies(server, network.cut)


def test_a_host_that_stands_still_is_given_up(network: Network, tmp_path: Path) -> None:
    """All its processes are stopped, as in a machine that is: its system still answers for its connections."""
    with two_hosts(tmp_path, network, "--tensor-parallel-size", "2") as (server, second):
        _dies(server, lambda: os.killpg(second.pid, signal.SIGSTOP))
        assert "says nothing for 15 s: the ranks here, and the engine, end" in server.log.read_text()
        os.killpg(second.pid, signal.SIGCONT)
        assert second.wait(2 * PATIENCE) is not None


def test_the_second_host_ends_with_the_first(network: Network, tmp_path: Path) -> None:
    with two_hosts(tmp_path, network, "--pipeline-parallel-size", "2") as (server, second):
        assert server.stop()
        assert second.wait(2 * PATIENCE) is not None


def test_hosts_that_choose_other_runners_are_told(network: Network, tmp_path: Path) -> None:
    """As where only one of them has a C++ compiler."""
    arguments = ("--tensor-parallel-size", "2")
    with pytest.raises(ServerError), two_hosts(tmp_path, network, *arguments, VLLM_USE_V2_MODEL_RUNNER="0"):
        pass
    for name in ("first", "second"):
        assert (
            "Not all ranks have the same of vLLM's model runners, V1 is that of 1:"
            in (tmp_path / f"{name}.log").read_text()
        )


def _dies(server: Server, kill: Callable[[], None]) -> None:
    """The second host dies while clients wait: they are told, and the first one ends."""
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(ask_until_it_fails, server, stream=stream) for stream in (True, False)]
        assert until(lambda: metric(server, "vllm:generation_tokens_total") > 50, 60)
        kill()
        answers = [client.result(timeout=2 * PATIENCE) for client in told]
    assert all(EVENT in answer.text[-300:] for answer in answers), answers
    assert until(lambda: not server.processes_alive(), PATIENCE)
