"""Runs prompts through engines that are started apart: servers whose replicas share experts, behind a balancer of the
user's, and the hosts of one engine.

``run_servers`` and ``run_hosts`` are for tests; the module's main is the process that starts them:
``python -m tests.support.servers_run scenario.json result.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_platform.demo.server import free_port
from tests.support.engine_run import run_scenario
from tests.support.network import Network
from tests.support.replicas_run import answered
from tests.support.vllm_process import run_module

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["run_hosts", "run_servers"]

_LIMIT = 300
_FORK = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}


def run_servers(
    folder: Path,
    model: Path,
    prompts: list[list[int]],
    *,
    new: int,
    replicas: int,
    devices: int,
    environ: dict[str, str] | None = None,
    **engine: Any,
) -> list[list[int]]:
    """Answer `prompts` in turn by two servers of so many replicas each, all of which share experts.

    As behind an external balancer where each has one replica, and behind a hybrid one where it has several. `devices`
    are those of both, `environ` further variables.
    """
    environ = {"NPU_SIMULATOR_DEVICES": str(devices), "NPU_SIMULATOR_MEMORY": "1GiB"} | _FORK | (environ or {})
    asked = {"engine": {"model": str(model), "skip_tokenizer_init": True, **engine}, "prompts": prompts, "new": new}
    return _run(folder, {"how": "servers", "replicas": replicas, **asked}, environ)


def run_hosts(
    folder: Path,
    model: Path,
    rounds: list[dict[str, Any]],
    network: Network,
    *,
    devices: int,
    environ: dict[str, str] | None = None,
    **engine: Any,
) -> list[list[int]]:
    """Run rounds (see ``tests.support.engine_run``) on an engine with half of its ranks, or replicas, on a second host.

    `devices` are those of each host, `environ` further variables. Return the token ids of the first round.
    """
    here = {"NPU_SIMULATOR_DEVICES": str(devices), "NPU_SIMULATOR_MEMORY": "2GiB", **network.environ(second=False)}
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | _FORK | here | (environ or {})
    asked = {"engine": {"model": str(model), "skip_tokenizer_init": True, **engine}, "rounds": rounds}
    how = "replicas" if engine.get("data_parallel_size", 1) > 1 else "nodes"
    return _run(folder, {"how": how, "network": asdict(network), **asked}, environ)


def _run(folder: Path, scenario: dict[str, Any], environ: dict[str, str]) -> list[list[int]]:
    folder.mkdir(parents=True, exist_ok=True)
    asked, result = folder / "scenario.json", folder / "result.json"
    asked.write_text(json.dumps(scenario))
    done = run_module("tests.support.servers_run", asked, result, **environ)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    said: list[list[int]] = json.loads(result.read_text())
    return said


def main(scenario_file: str, result_file: str) -> None:
    """Run the scenario."""
    scenario = json.loads(Path(scenario_file).read_text())
    run = {"servers": _servers, "nodes": _nodes, "replicas": _replicas}[scenario.pop("how")]
    Path(result_file).write_text(json.dumps(run(**scenario)))


def _servers(engine: dict[str, Any], replicas: int, prompts: list[list[int]], new: int) -> list[list[int]]:
    # the first server binds it seconds later only, and until then no connection may take it
    context, port = multiprocessing.get_context("fork"), free_port()
    answers: Any = context.Queue()
    all_are_done = context.Barrier(2)  # one that ends takes the others with it

    def serve(server: int) -> None:
        where = {"data_parallel_rank": server} if replicas == 1 else _of_a_host(server * replicas, replicas)
        where |= {"data_parallel_size": 2 * replicas}
        where |= {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": port}
        answers.put(
            (
                server,
                answered(engine | where, prompts[server::2], new, before_the_end=lambda: all_are_done.wait(_LIMIT)),
            )
        )

    servers = [context.Process(target=serve, args=(server,)) for server in range(2)]
    for server in servers:
        server.start()
    said = dict(answers.get(timeout=_LIMIT) for _ in servers)
    for server in servers:
        server.join(60)
    assert [server.exitcode for server in servers] == [0, 0]
    return [said[number % 2][number // 2] for number in range(len(prompts))]


def _of_a_host(first: int, replicas: int) -> dict[str, Any]:
    return {"data_parallel_hybrid_lb": True, "data_parallel_size_local": replicas, "data_parallel_start_rank": first}


def _nodes(engine: dict[str, Any], rounds: list[dict[str, Any]], network: dict[str, str]) -> list[list[int]]:
    from vllm.utils.network_utils import get_open_port

    both = engine | {"nnodes": 2, "master_addr": Network(**network).here, "master_port": get_open_port()}
    with _second_host(Network(**network), both | {"node_rank": 1}, patience=15):
        run = run_scenario({"engine": both | {"node_rank": 0}, "rounds": rounds})
    return [output["tokens"] for output in run["rounds"][0]]


def _replicas(engine: dict[str, Any], rounds: list[dict[str, Any]], network: dict[str, str]) -> list[list[int]]:
    from vllm.utils.network_utils import get_open_port

    (one,) = rounds
    where = {"data_parallel_address": Network(**network).here, "data_parallel_rpc_port": get_open_port()}
    both = engine | where | {"data_parallel_size_local": 1}
    with _second_host(Network(**network), both | {"data_parallel_start_rank": 1}, patience=0):
        return answered(both, one["prompts"], one["sampling"]["max_tokens"], one["lora"], replicas=2)


@contextlib.contextmanager
def _second_host(network: Network, engine: dict[str, Any], patience: float) -> Iterator[None]:
    """Start there what ``vllm serve --headless`` starts; it has so many seconds to end by itself after the block."""
    process = multiprocessing.get_context("fork").Process(target=_headless, args=(network, engine))
    process.start()
    try:
        yield
    finally:
        process.join(patience)
        process.terminate()
        process.join(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _headless(network: Network, engine: dict[str, Any]) -> None:
    from vllm.entrypoints.cli.serve import run_headless

    os.setsid()  # so that all of it can be ended
    network.enter()
    run_headless(argparse.Namespace(**engine, api_server_count=0, reasoning_parser_plugin=None))


if __name__ == "__main__":
    main(*sys.argv[1:])
