"""The worker's half: asks peers on the encrypted channel, and gives up reads at their deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from npu_kvconnector.compat import sleeping_agent
from npu_kvconnector.errors import UnsupportedError
from npu_kvconnector.p2p.channel import ChannelKeys, relay

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from npu_kvconnector.p2p.config import P2PConfig

__all__ = ["DeadlineWorker"]


class DeadlineWorker(NixlPullConnectorWorker):
    """vLLM's worker half of the pull connector, with an encrypted side channel and deadlines."""

    nixl_wrapper: Any
    """NIXL's agent, which vLLM's worker makes."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, config: P2PConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        threads = vllm_config.kv_transfer_config.get_from_extra_config("num_threads", 4)  # vLLM's own choice
        only_ucx = self.nixl_backends == ["UCX"]
        self.nixl_wrapper = sleeping_agent(self.nixl_wrapper, threads if only_ucx else 0)
        self._config = config
        self._keys = ChannelKeys.derive(config.secret())
        self._reading_since: dict[str, float] = {}

    def _nixl_handshake(self, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        """Ask a peer how to reach its workers; runs in a thread of vLLM's.

        Raises:
            UnsupportedError: the peer is not among those allowed.
        """
        if not self._config.allows(host, port):
            msg = f"{host}:{port} is not among the peers of this server"
            raise UnsupportedError(msg)
        with relay(host, port, self._keys, seconds=self._config.deadline) as local:
            return super()._nixl_handshake("127.0.0.1", local, *arguments, **options)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Report reads that ended, and those past their deadline as failed.

        A read that NIXL cannot take back keeps its blocks until it can, as in vLLM: they might still be written to.
        """
        done, failed = super()._pop_done_transfers(transfers)
        now = time.monotonic()
        self._reading_since = {request: self._reading_since.get(request, now) for request in transfers}
        for request, since in self._reading_since.items():
            if now - since <= self._config.deadline:
                continue
            left = [read for read in transfers[request] if not self._handle_failed_transfer(request, read, failed)]
            if left:
                transfers[request] = left
            else:
                del transfers[request]
                done.add(request)
        return done, failed
