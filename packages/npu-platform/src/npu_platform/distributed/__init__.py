"""Groups of npu devices under vLLM, and which executor starts their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

EXECUTOR = f"{__name__}.executor.NPUMultiprocExecutor"


def choose_executor(parallel: ParallelConfig) -> None:
    """Let an engine on several hosts be started by our executor, in the place of vLLM's ``mp``."""
    if parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp > 1:
        parallel.distributed_executor_backend = EXECUTOR


def is_multiprocessing(parallel: ParallelConfig) -> bool:
    """Return whether vLLM's multiprocessing executor, or ours, starts the ranks."""
    return parallel.distributed_executor_backend in ("mp", EXECUTOR)
