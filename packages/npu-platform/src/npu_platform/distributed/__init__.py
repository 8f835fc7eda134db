"""Groups of npu devices under vLLM, and which executor starts their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.envs as vllm_envs

from npu_platform import config

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

EXECUTOR = f"{__name__}.executor.NPUMultiprocExecutor"
_ASK_NO_NAME = {"NixlConnector", "NPUNixlConnector", "NPUOffloadConnector"}
"""KV connectors whose ranks share no memory of the host, or do whatever the executor's name."""


def choose_executor(vllm_config: VllmConfig) -> None:
    """Let ranks be started by our executors in the place of vLLM's ``mp`` and ``ray``, where those fall short.

    On one host vLLM's ``mp`` polls for the ranks' answers, on cores that compute where the device is the software NPU.
    Connectors of KV and encoder caches may share memory among ranks only where the executor's name is ``mp``: it stays
    for all but those that are known not to ask.
    """
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "mp":
        asks = vllm_config.ec_transfer_config is not None or not _kv_connectors(vllm_config) <= _ASK_NO_NAME
        if parallel.nnodes_within_dp > 1 or (shares_cores() and not asks):
            parallel.distributed_executor_backend = EXECUTOR
    elif parallel.distributed_executor_backend == "ray":
        config.offer_devices_to_ray(torch.npu.device_count())
        if vllm_envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
            from npu_platform.distributed.ray_executor import NPURayExecutor

            parallel.distributed_executor_backend = NPURayExecutor


def _kv_connectors(vllm_config: VllmConfig) -> set[str | None]:
    """Return the names of an engine's KV connectors, with those of vLLM's that is made of others."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return set()
    if transfer.kv_connector != "MultiConnector":
        return {transfer.kv_connector}
    return {part.get("kv_connector") for part in transfer.kv_connector_extra_config.get("connectors", [])}


def shares_cores() -> bool:
    """Return whether ranks compute on the cores that processes wait on: those of the software NPU do."""
    return torch.npu.device_count() > 0 and bool(torch.npu.get_device_properties().driver == "simulator")


def is_multiprocessing(parallel: ParallelConfig) -> bool:
    """Return whether vLLM's multiprocessing executor, or ours, starts the ranks."""
    return parallel.distributed_executor_backend in ("mp", EXECUTOR)
