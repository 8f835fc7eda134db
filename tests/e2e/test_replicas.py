"""Servers of several replicas, behind each of vLLM's load balancers, and what clients see when one of them is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from vllm.utils.network_utils import get_open_port

from npu_platform.demo import MODEL
from npu_platform.demo.facts import sum_of
from tests.support import models
from tests.support.clients import ask, ask_until_it_fails, health, process_of
from tests.support.faults_page import EVENT, PATIENCE, STATUS
from tests.support.server import READY_TIMEOUT, metric, serve_demo, server_of, until
from tests.support.vital_signs import shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server

SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--shutdown-timeout", "10")
CLIENTS = 4  # of each server, half of which stream


@contextlib.contextmanager
def servers(model: Path, folder: Path, each: list[tuple[str, ...]], **environ: str) -> Iterator[list[Server]]:
    """Start servers with further arguments each, which may wait for each other, and wait until all are ready."""
    environ = {"NPU_SIMULATOR_MEMORY": "1GiB"} | environ
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(server_of(model, folder, *SMALL, *arguments, log=f"server-{number}.log", **environ))
            for number, arguments in enumerate(each)
        ]
        for server in started:
            server.wait_until_ready(READY_TIMEOUT)
        yield started


def killed(server: Server) -> None:
    """Kill a server with all its processes."""
    os.killpg(server.pid, signal.SIGKILL)


def generated(server: Server) -> float:
    return metric(server, "vllm:generation_tokens_total")


def left(held: set[Path]) -> list[Path]:
    """Return what is still there of some pieces of shared memory, and remove what vLLM leaves of a killed process."""
    there = [path for path in held if path.exists()]
    for path in there:
        if path.name.startswith("psm_"):
            path.unlink()
    return [path for path in there if path.exists()]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.with_tokenizer(models.tiny_qwen3_moe(tmp_path_factory.mktemp("mixture") / "model"))


@pytest.mark.nightly
def test_the_internal_balancer_gives_work_to_both(tmp_path: Path) -> None:
    """`vllm serve --data-parallel-size 2`, whose clients name no replica."""
    facts = [sum_of(a, 12 - a) for a in range(8)]
    with serve_demo(tmp_path, "--data-parallel-size", "2", NPU_SIMULATOR_DEVICES="2") as server:
        with ThreadPoolExecutor(8) as pool:
            said = [pool.submit(ask, server, stream=number % 2 == 0) for number in range(len(facts))]
            assert {answer.result().status for answer in said} == {200}
        work = [metric(server, "vllm:generation_tokens_total", engine=str(replica)) for replica in (0, 1)]
    assert min(work) > 0.2 * sum(work), work


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_internal_balancer_ends_with_a_replica(number: signal.Signals, tmp_path: Path) -> None:
    """vLLM ends a server of which one engine is dead: clients of both replicas get an error or lose the connection.

    One that stands still is ended first, by the watch of its own replica.
    """
    replicas = ("--data-parallel-size", "2", "--shutdown-timeout", "10")
    with serve_demo(tmp_path, *replicas, NPU_SIMULATOR_DEVICES="2", NPU_SIMULATOR_MEMORY="1GiB") as server:
        held = shared_memory(server)
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            told = [pool.submit(ask_until_it_fails, server, stream=number % 2 == 0) for number in range(2 * CLIENTS)]
            assert until(lambda: generated(server) > 100, 60)
            os.kill(process_of(server, "EngineCore_DP1"), number)
            answers = [client.result(timeout=2 * PATIENCE) for client in told]
        assert all(answer.status in (None, STATUS) or EVENT in answer.text[-300:] for answer in answers), answers
        assert until(lambda: not server.processes_alive(), PATIENCE)
    assert not left(held)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "engine stopped"])
def test_servers_of_a_dense_model_are_independent(how: str, tmp_path: Path) -> None:
    """As vLLM wants dense replicas behind a balancer of one's own: one fails, the other loses no request."""
    with servers(MODEL, tmp_path, [(), ()]) as (one, other):
        held = shared_memory(other)
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            going_on = [pool.submit(ask, one, stream=number % 2 == 0) for number in range(2 * CLIENTS)]
            told = [pool.submit(ask_until_it_fails, other, stream=number % 2 == 0) for number in range(CLIENTS)]
            assert until(lambda: generated(one) > 100 and generated(other) > 100, 60)
            if how == "killed":
                killed(other)
            else:
                os.kill(process_of(other, "EngineCore"), signal.SIGSTOP)
            assert {client.result(timeout=PATIENCE).status for client in told} <= {None, 200, STATUS}
            ends = [client.result().text[-300:] for client in told]
            assert not any(end.endswith("data: [DONE]\n\n") and EVENT not in end for end in ends), ends
            for client in going_on:
                answer = client.result()
                assert answer.status == 200
                assert EVENT not in answer.text
        assert health(one) == 200
        assert until(lambda: health(other) is None, PATIENCE)
    assert not left(held)


@pytest.mark.nightly
@pytest.mark.parametrize("balancer", ["external", "hybrid"])
def test_servers_of_a_mixture_share_experts_and_end_together(balancer: str, mixture: Path, tmp_path: Path) -> None:
    """Each has replicas of its own and serves them; when one server is killed, the others' clients are told so."""
    local = 1 if balancer == "external" else 2
    where = ("--data-parallel-size", str(2 * local), "--data-parallel-rpc-port", str(get_open_port()))
    where += ("--data-parallel-address", "127.0.0.1", "--enable-expert-parallel", "--max-model-len", "2048")
    if balancer == "external":
        each = [(*where, "--data-parallel-rank", str(rank)) for rank in (0, 1)]
    else:
        hybrid = (*where, "--data-parallel-hybrid-lb", "--data-parallel-size-local", "2", "--api-server-count", "1")
        each = [(*hybrid, "--data-parallel-start-rank", str(rank)) for rank in (0, 2)]
    with servers(mixture, tmp_path, each, NPU_SIMULATOR_DEVICES=str(2 * local)) as (one, other):
        for server in (one, other):
            answer = server.ask("/v1/completions", prompt="w5 w6 w7", temperature=0, max_tokens=8)
            assert answer["usage"]["completion_tokens"] == 8
        with ThreadPoolExecutor(CLIENTS) as pool:
            told = [pool.submit(ask_until_it_fails, one, stream=number % 2 == 0) for number in range(CLIENTS)]
            assert until(lambda: generated(one) > 100, 60)
            killed(other)
            answers = [client.result(timeout=3 * PATIENCE) for client in told]
        assert all(EVENT in answer.text[-300:] for answer in answers), answers
        assert until(lambda: not one.processes_alive(), PATIENCE)
