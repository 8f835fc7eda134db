"""One engine on two hosts: two of vLLM's nodes, the second with a name and a network of its own, so that they share no memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from npu_platform.demo.server import Server, ServerError
from tests.support.clients import ask_until_it_fails
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.server import READY_TIMEOUT, metric, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20))


@dataclass(frozen=True)
class Network:
    """A cable to a namespace: its ends have an address and a device each."""

    name: str
    here: str = "10.254.77.1"
    there: str = "10.254.77.2"

    def cut(self) -> None:
        """Let nothing through any more, as where a host has no power."""
        subprocess.run(["ip", "link", "set", f"{self.name}a", "down"], check=True)

    def environ(self, *, second: bool) -> dict[str, str]:
        """Return what tells vLLM and gloo the address and the device of one end."""
        address, end = (self.there, "b") if second else (self.here, "a")
        return {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": f"{self.name}{end}"}


@pytest.fixture
def network() -> Iterator[Network]:
    """Make a network namespace; skips where that takes rights that this user has not."""
    made = Network(f"npu{os.getpid()}")
    name, mask = made.name, "/30"
    steps = (
        f"link add {name}a type veth peer name {name}b netns {name}",
        f"addr add {made.here}{mask} dev {name}a",
        f"link set {name}a up",
        f"-n {name} addr add {made.there}{mask} dev {name}b",
        f"-n {name} link set {name}b up",
        f"-n {name} link set lo up",
    )
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        pytest.skip("network namespaces need the program ip, and CAP_SYS_ADMIN")
    try:
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True)
        yield made
    finally:
        # The cable first: with its namespace it would go some time later.
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False)
        subprocess.run(["ip", "netns", "del", name], check=True)


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
    inside = ["ip", "netns", "exec", network.name, "unshare", "--uts", "sh", "-c", 'hostname second && exec "$@"', "sh"]
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
