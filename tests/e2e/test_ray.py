"""Ray starts the ranks of an engine: two of its nodes on this host, each of which has one NPU to give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.engine_run import run_engine
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly
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
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="pip install npu-platform[ray]")
    node = {"num_cpus": 2, "resources": {"NPU": 1}, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node)
    yield made.address
    made.shutdown()


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
