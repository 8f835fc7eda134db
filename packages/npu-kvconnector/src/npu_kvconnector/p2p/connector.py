"""NPUNixlConnector: vLLM's NixlConnector among servers that trust each other, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from npu_kvconnector.errors import OptionError, UnsupportedError
from npu_kvconnector.p2p.config import P2PConfig
from npu_kvconnector.p2p.scheduler import TicketScheduler
from npu_kvconnector.p2p.worker import DeadlineWorker

if TYPE_CHECKING:
    from typing import Any

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NPUNixlConnector"]


class NPUNixlConnector(NixlBaseConnector):
    """Reads the blocks of a prompt from the server that computed it, with tickets, encryption and deadlines."""

    works_between_steps = True  # read by npu-platform: no layer waits for a transfer, so a graph may hold whole steps

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build the scheduler's or the worker's half.

        Raises:
            OptionError: ``kv_connector_extra_config`` is wrong, or a failed read would fail its request.
            UnsupportedError: decode context parallelism.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            msg = (
                "NPUNixlConnector computes a prompt that it cannot read: "
                'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
            )
            raise OptionError(msg)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            msg = "NPUNixlConnector does not support decode context parallelism; use --tensor-parallel-size instead"
            raise UnsupportedError(msg)
        config = P2PConfig.parse(transfer.kv_connector_extra_config, is_consumer=transfer.kv_role != "kv_producer")
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = TicketScheduler(vllm_config, self.engine_id, kv_cache_config, config)
        else:
            self.connector_worker = DeadlineWorker(vllm_config, self.engine_id, kv_cache_config, config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to read what the scheduler has allowed in this step."""
        self.connector_worker.start_load_kv(self._connector_metadata)
