"""Ray starts the ranks of an engine: two of its nodes on this host, each of which has one NPU to give."""

from __future__ import annotations

import contextlib
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support import models
from tests.support import ray_nodes as nodes
from tests.support.clients import Answer, ask, ask_until_it_fails
from tests.support.engine_run import run_engine
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.server import READY_TIMEOUT, demo_server, metric, serve_demo, until
from tests.support.transformers_reference import assert_greedy, load
from tests.support.vital_signs import shared_memory

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server
    from tests.support.network import Network

pytestmark = pytest.mark.nightly
pytest.importorskip("ray", reason="pip install npu-platform[ray]")
NEW = 6
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 32 << 20,
    "distributed_executor_backend": "ray",
}
RAY = ("--distributed-executor-backend", "ray", "--shutdown-timeout", "10")
VARIABLES = {"NPU_SIMULATOR_MEMORY": "1GiB", "NPU_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes."""
    with nodes.two_nodes() as (made, _):
        yield made.address


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_ranks_on_two_nodes(layout: str, cluster: str, tmp_path: Path) -> None:
    """Each rank has the NPU of its node, and the variables of the process that started the engine."""
    model, prompts = models.tiny_llama(tmp_path / "model"), models.prompt_token_ids([5, 40, 17])
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    environ = VARIABLES | {"RAY_ADDRESS": cluster}
    run = run_engine(tmp_path, model, rounds, environ, **ENGINE | {f"{layout}_parallel_size": 2})
    for prompt, output in zip(prompts, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(load(model), prompt, output)


def test_a_ray_that_vllm_starts_has_the_devices_of_the_host(tmp_path: Path) -> None:
    """Nobody ran ``ray start``: as on one host of GPUs, the engine has Ray all the same."""
    model, prompts = models.tiny_llama(tmp_path / "model"), models.prompt_token_ids([5, 40, 17])
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": NEW}}]
    environ = VARIABLES | {"NPU_SIMULATOR_DEVICES": "2", "RAY_ADDRESS": "local"}
    run = run_engine(tmp_path, model, rounds, environ, **ENGINE | {"tensor_parallel_size": 2})
    for prompt, output in zip(prompts, run.tokens(0), strict=True):
        assert_greedy(load(model), prompt, output)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_raylet_is_killed(layout: str, tmp_path: Path) -> None:
    """The rank of its node ends with it, the last stage of a pipeline: all are told, and another node serves again."""
    arguments = (*RAY, f"--{layout}-parallel-size", "2")
    with nodes.two_nodes() as (cluster, second):
        address = cluster.address
        with serve_demo(tmp_path, *arguments, **VARIABLES, RAY_ADDRESS=address) as server, clients(server) as told:
            ranks, held = what_it_has(server)
            second.kill_raylet()
            all_are_told(server, told)
        assert until(lambda: not ranks & nodes.ranks(), PATIENCE)
        assert not still_there(held)
        cluster.add_node(**nodes.NODE)
        with serve_demo(tmp_path, *arguments, **VARIABLES, RAY_ADDRESS=address) as server:
            assert ask(server, stream=False).status == httpx.codes.OK


def test_the_raylet_of_the_engines_node_is_killed(tmp_path: Path) -> None:
    """Ray ends the engine, which asked it for ranks, with the rank of that node; the other node's ends by itself."""
    with (
        nodes.two_nodes() as (cluster, _),
        serve_demo(tmp_path, *RAY, "--tensor-parallel-size", "2", **VARIABLES, RAY_ADDRESS=cluster.address) as server,
        clients(server) as told,
    ):
        ranks, held = what_it_has(server)
        cluster.head_node.kill_raylet()
        all_are_told(server, told)
        assert until(lambda: not ranks & nodes.ranks(), PATIENCE)
        assert not still_there(held)


def test_an_engine_says_which_devices_it_waits_for(tmp_path: Path) -> None:
    """Ray was started without NPUs, and vLLM would wait for half an hour; the engine goes on when nodes come with some."""
    with (
        nodes.one_without_devices() as cluster,
        demo_server(tmp_path, *RAY, "--tensor-parallel-size", "2", **VARIABLES, RAY_ADDRESS=cluster.address) as server,
    ):
        said = "Ray has 0 free of the resource NPU and this engine needs 2"
        assert until(lambda: said in server.log.read_text(), READY_TIMEOUT)
        for _ in range(2):
            cluster.add_node(**nodes.NODE)
        server.wait_until_ready(READY_TIMEOUT)
        assert ask(server, stream=False).status == httpx.codes.OK
        assert "ray start --resources='{\"NPU\": 2}'" in server.log.read_text()


def test_an_end_leaves_nothing(cluster: str, tmp_path: Path) -> None:
    """Ray kills the ranks, which cannot remove what they share with others."""
    with serve_demo(tmp_path, *RAY, "--tensor-parallel-size", "2", **VARIABLES, RAY_ADDRESS=cluster) as server:
        assert ask(server, stream=False).status == httpx.codes.OK
        ranks, held = what_it_has(server)
        assert server.stop()
    assert until(lambda: not ranks & nodes.ranks(), PATIENCE)
    assert not still_there(held)


@pytest.mark.parametrize("what", ["node killed", "node stopped", "rank stopped"])
def test_a_node_or_its_rank_fails(what: str, network: Network, tmp_path: Path) -> None:
    """A stopped rank is ended by what looks after it, a stopped node is silent; when that goes on, its rank ends, too."""
    with on_two_hosts(tmp_path, network) as (server, second), clients(server) as told:
        there = psutil.Process(second.pid).children(recursive=True)
        ranks, held = what_it_has(server)
        victims = [process for process in there if process.pid in ranks] if what == "rank stopped" else there
        assert victims
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                process.send_signal(signal.SIGKILL if what == "node killed" else signal.SIGSTOP)
        all_are_told(server, told)
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        assert until(lambda: not ranks & nodes.ranks(), PATIENCE), "a rank stays without its engine"
        assert not still_there(held)


def test_a_raylet_is_stopped(network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks do without it, until Ray gives the node up: then all are told, and the rank there ends, which Ray cannot end.

    That takes Ray 65 s, here less.
    """
    for name, value in {"period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    with on_two_hosts(tmp_path, network) as (server, second), clients(server) as told:
        there = psutil.Process(second.pid).children(recursive=True)
        ranks, held = what_it_has(server)
        (raylet,) = (process for process in there if process.name() == "raylet")
        raylet.suspend()
        before = metric(server, "vllm:generation_tokens_total")
        assert until(lambda: metric(server, "vllm:generation_tokens_total") > before + 50, PATIENCE)
        all_are_told(server, told)
        assert until(lambda: not ranks & nodes.ranks(), PATIENCE), "the rank stays beside the raylet that stands still"
        assert not still_there(held)


@contextlib.contextmanager
def on_two_hosts(folder: Path, network: Network) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Serve on two of Ray's nodes that share no memory; yield the server, and what has started the second one."""
    with nodes.two_hosts(network) as (address, second):
        environ = VARIABLES | network.environ(second=False) | {"RAY_ADDRESS": address}
        with serve_demo(folder, *RAY, "--tensor-parallel-size", "2", **environ) as server:
            yield server, second


@contextlib.contextmanager
def clients(server: Server) -> Iterator[list[Future[Answer]]]:
    """Let clients ask until they are told of an error; begins when they have got tokens."""
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(ask_until_it_fails, server, stream=stream) for stream in (True, False)]
        assert until(lambda: metric(server, "vllm:generation_tokens_total") > 50, 60)
        yield told


def what_it_has(server: Server) -> tuple[set[int], set[Path]]:
    """Return the processes of its ranks, and what shared memory with a name it has."""
    ranks = nodes.ranks()
    return ranks, shared_memory(server, *ranks)


def all_are_told(server: Server, told: list[Future[Answer]]) -> None:
    begin = time.monotonic()
    answers = [client.result(timeout=2 * PATIENCE) for client in told]
    print(f"clients were told after {time.monotonic() - begin:.1f} s")
    assert all(EVENT in answer.text[-300:] for answer in answers), answers
    assert until(lambda: not server.processes_alive(), PATIENCE)


def still_there(held: set[Path]) -> list[Path]:
    return [path for path in held if path.exists()]
