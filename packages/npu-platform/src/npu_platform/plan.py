"""What each rank gets of this host: a device, memory nodes, threads and memory.

Before a start by ``npu doctor --plan -- MODEL ...``, and in the log of a start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from npu_platform import compat, numa
from npu_platform.config import NPUConfig, variables_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import ParallelConfig, VllmConfig

__all__ = ["Rank", "config_of", "planned", "text"]

_GIB = 1 << 30
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, order=True)
class Rank:
    """One worker process: its place in the layout, and what of the host is its own."""

    replica: int
    """Data-parallel rank."""
    stage: int
    """Pipeline rank."""
    part: int
    """Tensor-parallel rank."""
    device: int
    """Ordinal in the process."""
    nodes: tuple[int, ...]
    """Memory nodes whose processors it may use."""
    threads: int
    """Threads of its kernels."""
    memory: int
    """Bytes of the device that vLLM may use."""
    host: str = ""
    """Of several."""

    def name(self) -> str:
        """Return the place in the layout."""
        return f"replica {self.replica}, stage {self.stage}, part {self.part}"

    def share(self) -> str:
        """Return what it gets."""
        nodes = f"memory node{'s' * (len(self.nodes) > 1)} {', '.join(map(str, self.nodes))}"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        host = f"{self.host}, " if self.host else ""
        return f"{host}npu:{self.device}, {nodes}, {threads}, {self.memory / _GIB:.2f} GiB"


def text(ranks: Sequence[Rank]) -> str:
    """Return a line for each rank."""
    return "\n".join(f"  {rank.name()}: {rank.share()}" for rank in sorted(ranks))


def config_of(arguments: Sequence[str]) -> VllmConfig:
    """Return the configuration that ``vllm serve`` makes of these arguments; ends the process where they are wrong."""
    with _stdout_to_stderr():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        given = compat.serve_argument_parser()(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(arguments))
        given.model = getattr(given, "model_tag", None) or given.model
        return AsyncEngineArgs.from_cli_args(given).create_engine_config()


def planned(vllm_config: VllmConfig) -> list[Rank]:
    """Return what the ranks that this host would start get; a device may be one that is not there."""
    parallel = vllm_config.parallel_config
    places = _places(parallel)
    devices = parallel.assigned_physical_gpu_ids or range(len(places))
    of_node = numa.nodes()
    bound = parallel.numa_bind_nodes if parallel.numa_bind else None
    nodes = [(bound[i],) if bound else tuple(of_node) for i in range(len(places))]
    threads = _threads(vllm_config, [[core for node in its for core in of_node.get(node, [])] for its in nodes])
    total = torch.npu.mem_get_info()[1] if torch.npu.device_count() else 0
    memory = int(total * vllm_config.cache_config.gpu_memory_utilization)
    shares = zip(places, devices, nodes, threads, strict=False)
    return [Rank(*place, device, its, count, memory) for place, device, its, count in shares]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep what vLLM logs out of our output: its handler has taken hold of the file, whatever ``sys.stdout`` is."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


def _places(parallel: ParallelConfig) -> list[tuple[int, int, int]]:
    """Return replica, stage and part of each rank of this host, in the order of their devices."""
    replicas, first = parallel.data_parallel_size_local, parallel.data_parallel_rank
    local = parallel.local_world_size
    before = local * parallel.node_rank_within_dp
    ranks = range(before, before + local)
    size = parallel.tensor_parallel_size
    return [(first + replica, rank // size, rank % size) for replica in range(replicas) for rank in ranks]


def _threads(vllm_config: VllmConfig, cores: list[list[int]]) -> list[int]:
    """Return the threads of each rank; a core is shared by the ranks that may use it, as in ``NPUWorker``."""
    chosen = NPUConfig.from_additional_config(vllm_config.additional_config).num_threads
    if chosen is None and "NPU_NUM_THREADS" in variables_set():
        chosen = torch.npu.get_num_threads()
    if chosen is not None:
        return [chosen] * len(cores)
    users = Counter(core for its in cores for core in its)
    return [max(1, int(sum(1 / users[core] for core in its) + 1e-9)) for its in cores]
