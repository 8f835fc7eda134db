"""The host's memory nodes: which there are, which of them vLLM binds ranks to, and how many cores a rank has."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from npu_platform.config import NPUConfig, variables_set

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.config import ParallelConfig, VllmConfig

__all__ = ["bind_ranks", "cores_of_rank", "nodes", "share_among_replicas", "where"]

_NODES = Path("/sys/devices/system/node")


def nodes(allowed: Collection[int] | None = None, root: Path = _NODES) -> dict[int, list[int]]:
    """Return the processors that this process may use, or those given, by the memory node that they are beside.

    Nodes without one are left out; a host that does not tell has one node.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    found = {}
    for folder in root.glob("node*"):
        number = re.fullmatch(r"node(\d+)", folder.name)
        processors = [i for i in _processors(folder / "cpulist") if i in allowed] if number else []
        if number and processors:
            found[int(number[1])] = processors
    return dict(sorted(found.items())) or {0: sorted(allowed)}


def bind_ranks(parallel: ParallelConfig, found: Iterable[int] | None = None) -> None:
    """Give each rank of this host a memory node in turn, where ``--numa-bind`` asks for it without naming nodes.

    vLLM finds the nodes of GPUs by itself, and refuses to start elsewhere.
    """
    if not parallel.numa_bind or parallel.numa_bind_nodes is not None:
        return
    there = sorted(nodes() if found is None else found)
    local = parallel.data_parallel_rank_local
    replica = parallel.data_parallel_index if local is None else local
    replicas = max(parallel.data_parallel_size_local, replica + 1)
    parallel.numa_bind_nodes = [there[i % len(there)] for i in range(parallel.world_size * replicas)]


def share_among_replicas(vllm_config: VllmConfig) -> None:
    """Set the threads of the ranks of several replicas that this host starts, unless the user has.

    vLLM makes a replica of a dense model believe that it is alone: it cannot find its share of the cores by itself.
    """
    parallel, settings = vllm_config.parallel_config, vllm_config.additional_config
    replicas = parallel.data_parallel_size_local
    if replicas < 2 or parallel.numa_bind or not isinstance(settings, dict):
        return
    if NPUConfig.from_additional_config(settings).num_threads is not None or "NPU_NUM_THREADS" in variables_set():
        return
    threads = max(1, len(os.sched_getaffinity(0)) // (replicas * parallel.local_world_size))
    vllm_config.additional_config = settings | {"npu": {**settings.get("npu", {}), "num_threads": threads}}


def where() -> tuple[str, frozenset[int]]:
    """Return which boot of which host this is, and the processors that this process may use."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), frozenset(os.sched_getaffinity(0))


def cores_of_rank(mine: tuple[str, frozenset[int]], of_all: Iterable[tuple[str, frozenset[int]]]) -> int:
    """Return how many cores a rank has, from :func:`where` of it and of all ranks.

    Each core is shared by the ranks that may use it.
    """
    host, processors = mine
    users = Counter(i for other, theirs in of_all if other == host for i in theirs)
    return max(1, int(sum(1 / users[i] for i in processors) + 1e-9))


def _processors(cpulist: Path) -> list[int]:
    """Return the numbers in a list as Linux writes it: ``0-3,8,10-11``."""
    ranges = [item.partition("-") for item in cpulist.read_text().strip().split(",") if item]
    return [i for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]
