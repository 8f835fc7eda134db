"""Groups of npu devices under vLLM, and which executor starts their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm.envs as vllm_envs

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

EXECUTOR = f"{__name__}.executor.NPUMultiprocExecutor"


def choose_executor(parallel: ParallelConfig) -> None:
    """Let an engine on several hosts be started by our executors, in the place of vLLM's ``mp`` and ``ray``."""
    if parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp > 1:
        parallel.distributed_executor_backend = EXECUTOR
    elif parallel.distributed_executor_backend == "ray" and vllm_envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        from npu_platform.distributed.ray_executor import NPURayExecutor

        parallel.distributed_executor_backend = NPURayExecutor


def is_multiprocessing(parallel: ParallelConfig) -> bool:
    """Return whether vLLM's multiprocessing executor, or ours, starts the ranks."""
    return parallel.distributed_executor_backend in ("mp", EXECUTOR)
