"""One engine on two hosts: two of vLLM's nodes, the second with a name and a network of its own, so that they share no memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from npu_platform.demo.server import Server, ServerError
from tests.support import models
from tests.support.clients import ask_until_it_fails
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.server import READY_TIMEOUT, metric, until
from tests.support.vital_signs import shared_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.network import Network

pytestmark = pytest.mark.nightly
SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--shutdown-timeout", "10")


@contextlib.contextmanager
def two_hosts(
    folder: Path, network: Network, *arguments: str, model: Path = MODEL, replicas: bool = False, **of_second: str
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Serve a model on this host and on one called "second", each of which starts half of the ranks, or a replica.

    `of_second`: further variables of the second's.
    """
    environ = os.environ | {"NPU_SIMULATOR_DEVICES": "1", "NPU_SIMULATOR_MEMORY": "1GiB"}
    there, here = (environ | network.environ(second=second) for second in (True, False))
    port = str(get_open_port())
    if replicas:
        both = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
        both += ("--data-parallel-address", network.here, "--data-parallel-rpc-port", port)
        of_first, of_other = ("--api-server-count", "1"), ("--data-parallel-start-rank", "1")
    else:
        both = ("--nnodes", "2", "--master-addr", network.here, "--master-port", port)
        of_first, of_other = ("--node-rank", "0"), ("--node-rank", "1")
    both += (*SMALL, *arguments)
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--headless"]
    second = network.on_second_host([*serve, *both, *of_other])
    first = Server(model, *both, *of_first, log=folder / "first.log", environment=here)
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.with_tokenizer(models.tiny_qwen3_moe(tmp_path_factory.mktemp("mixture") / "model"))


@pytest.mark.parametrize("how", ["killed", "engine killed", "engine stopped", "stopped", "cut off"])
def test_a_replica_on_another_host(how: str, network: Network, tmp_path: Path) -> None:
    """vLLM's server does not look after it, and its clients would wait for ever."""
    with two_hosts(tmp_path, network, replicas=True) as (server, second):
        held = shared_memory(server)
        _dies(server, lambda: _fails(how, second, network), both=True)
        said = "has ended" if how.startswith("engine") else "says nothing for 15 s"
        assert f"npu: the replica at {network.there} {said}" in server.log.read_text()
        _ends_when_it_goes_on(second)
    assert not [path for path in held if path.exists()]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_replica_on_another_host_that_shares_experts(
    how: str, mixture: Path, network: Network, tmp_path: Path
) -> None:
    experts = ("--enable-expert-parallel", "--max-model-len", "2048")
    with two_hosts(tmp_path, network, *experts, model=mixture, replicas=True) as (server, second):
        _dies(server, lambda: _fails(how, second, network), both=True)
        _ends_when_it_goes_on(second)


def test_replicas_on_other_hosts_end_with_their_server(network: Network, tmp_path: Path) -> None:
    """vLLM's own would wait for it for ever."""
    with two_hosts(tmp_path, network, replicas=True) as (server, second):
        assert server.stop()
        assert second.wait(PATIENCE) is not None


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


def _fails(how: str, second: subprocess.Popen[bytes], network: Network) -> None:
    if how == "cut off":
        network.cut()
    elif how.startswith("engine"):
        there = psutil.Process(second.pid).children(recursive=True)
        (engine,) = (process for process in there if "EngineCore" in "".join(process.cmdline()))
        engine.send_signal(signal.SIGKILL if how == "engine killed" else signal.SIGSTOP)
    else:
        os.killpg(second.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def _ends_when_it_goes_on(second: subprocess.Popen[bytes]) -> None:
    os.killpg(second.pid, signal.SIGCONT)
    assert second.wait(2 * PATIENCE) is not None, "it stays without its server"


def _dies(server: Server, kill: Callable[[], None], *, both: bool = False) -> None:
    """The second host dies while clients wait: they are told, and the first one ends. `both` are replicas, and work."""
    labels: list[dict[str, str]] = [{"engine": "0"}, {"engine": "1"}] if both else [{}]
    with ThreadPoolExecutor(4) as pool:
        told = [pool.submit(ask_until_it_fails, server, stream=number % 2 == 0) for number in range(2 * len(labels))]
        assert until(lambda: all(metric(server, "vllm:generation_tokens_total", **one) > 50 for one in labels), 60), (
            server.log_tail()
        )
        kill()
        begin = time.monotonic()
        answers = [client.result(timeout=2 * PATIENCE) for client in told]
    print(f"clients were told after {time.monotonic() - begin:.1f} s")
    assert all(EVENT in answer.text[-300:] for answer in answers), answers
    assert until(lambda: not server.processes_alive(), PATIENCE)
