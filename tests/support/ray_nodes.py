"""A Ray cluster of two nodes on this host, each of which has one NPU to give."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.server import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.network import Network

__all__ = ["NODE", "one_without_devices", "ranks", "two_hosts", "two_nodes"]

NODE: dict[str, Any] = {
    "num_cpus": 2,
    "resources": {"NPU": 1},
    "object_store_memory": 100 << 20,
    "include_dashboard": False,
}
# Under `uv run` Ray would make an environment of its own for its workers. It reads this where it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """Run a cluster of two nodes; yield it and the second one. Raises ImportError where Ray is not there."""
    made = _head()
    second = made.add_node(**NODE)
    try:
        yield made, second
    finally:
        made.shutdown()


@contextlib.contextmanager
def one_without_devices() -> Iterator[Any]:
    """Run a cluster of one node that was started without its NPUs; yield it. Raises ImportError where Ray is not there."""
    made = _head(resources={})
    try:
        yield made
    finally:
        made.shutdown()


@contextlib.contextmanager
def two_hosts(network: Network) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a cluster of this host and one called "second"; yield its address, and the leader of all of second's processes.

    Raises ImportError where Ray is not there.
    """
    made = _head(node_ip_address=network.here)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", made.address, "--block"]
    start += ["--node-ip-address", network.there, "--num-cpus", "2", "--resources", json.dumps(NODE["resources"])]
    start += ["--object-store-memory", str(NODE["object_store_memory"]), "--disable-usage-stats"]
    environ = os.environ | network.environ(second=True)
    second = subprocess.Popen(network.on_second_host(start), env=environ, start_new_session=True)
    try:
        nodes = made.global_state.node_table
        assert until(lambda: sum(node["Alive"] for node in nodes()) == 2, 60), "the second node does not come"
        yield made.address, second
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(second.pid, signal.SIGKILL)
        second.wait()
        made.shutdown()


def ranks() -> set[int]:
    """Return the processes of ranks that nodes of Ray have started on this machine."""
    return {process.pid for process in psutil.process_iter() if _title(process).startswith("ray::RayWorkerProc")}


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline())
    return ""


def _head(**arguments: Any) -> Any:
    cluster_utils = importlib.import_module("ray.cluster_utils")
    return cluster_utils.Cluster(initialize_head=True, head_node_args=NODE | arguments)
