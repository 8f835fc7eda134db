"""Ray starts the ranks of an engine: two of its nodes on this host, each of which has one NPU to give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.clients import ask_until_it_fails
from tests.support.engine_run import run_engine
from tests.support.faults_page import EVENT, PATIENCE
from tests.support.ray_nodes import two_nodes
from tests.support.server import metric, serve_demo, until
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
VARIABLES = {"NPU_SIMULATOR_MEMORY": "1GiB", "NPU_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes."""
    with two_nodes() as (address, _):
        yield address


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


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_raylet_is_killed(layout: str, tmp_path: Path) -> None:
    """The rank of its node ends with it, the last stage of a pipeline: all clients are told, and the server ends."""
    arguments = ("--distributed-executor-backend", "ray", f"--{layout}-parallel-size", "2")
    with two_nodes() as (address, second), serve_demo(tmp_path, *arguments, **VARIABLES, RAY_ADDRESS=address) as server:
        with ThreadPoolExecutor(2) as pool:
            told = [pool.submit(ask_until_it_fails, server, stream=stream) for stream in (True, False)]
            assert until(lambda: metric(server, "vllm:generation_tokens_total") > 50, 60)
            second.kill_raylet()
            answers = [client.result(timeout=2 * PATIENCE) for client in told]
        assert all(EVENT in answer.text[-300:] for answer in answers), answers
        assert until(lambda: not server.processes_alive(), PATIENCE)
