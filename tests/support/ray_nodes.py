"""A Ray cluster of two nodes on this host, each of which has one NPU to give."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["two_nodes"]

# Under `uv run` Ray would make an environment of its own for its workers. It reads this where it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, Any]]:
    """Run a cluster of two nodes; yield its address and the second one. Raises ImportError where Ray is not there."""
    cluster_utils = importlib.import_module("ray.cluster_utils")
    node = {"num_cpus": 2, "resources": {"NPU": 1}, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    second = made.add_node(**node)
    try:
        yield made.address, second
    finally:
        made.shutdown()
