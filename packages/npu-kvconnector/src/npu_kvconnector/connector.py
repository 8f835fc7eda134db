"""NPUOffloadConnector: vLLM's offloading connector with tiers that any device can use and that may fail.

vLLM's connector decides what to store, to load and to evict, fences transfers against the reuse of blocks (preemption,
abort) and reports the statistics. What it lacks is a worker for devices other than CUDA and XPU, and an answer to a
transfer that fails: those are here.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from npu_kvconnector import CONNECTOR
from npu_kvconnector.compat import recompute_failed_loads
from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.errors import UnsupportedError
from npu_kvconnector.fingerprint import SETTINGS, settings_digest
from npu_kvconnector.frame.room import Room
from npu_kvconnector.frame.scheduler import RecoveringScheduler
from npu_kvconnector.frame.worker import RecoveringWorker

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["NPUOffloadConnector"]

_SPEC = "NPUTieringSpec"
_LASTING = ("durable", "remote")
"""Types of tiers whose blocks outlive an engine."""
OffloadingSpecFactory.register_spec(_SPEC, "npu_kvconnector.spec", _SPEC)


class NPUOffloadConnector(OffloadingConnector):
    """Keeps KV blocks in host memory and in tiers behind it, on any device that vLLM runs on."""

    works_between_steps = True  # read by npu-platform: no layer waits for a transfer, so a graph may hold whole steps

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build the scheduler's or the worker's half.

        Raises:
            OptionError: ``kv_connector_extra_config`` is wrong.
            UnsupportedError: the deployment cannot be served.
            CapacityError: the host tier would hold no chunk, or the host has less memory.
        """
        _refuse_unsupported(vllm_config, kv_cache_config)
        framed = _with_spec(vllm_config)
        # Not OffloadingConnector's, which makes halves that end the engine where a job fails.
        KVConnectorBase_V1.__init__(self, framed, role, kv_cache_config)
        config = as_laid_out_here(build_offloading_config(framed, kv_cache_config))
        self._canonical_layout = config.canonical_layout
        spec = OffloadingSpecFactory.create_spec(config)
        self.connector_scheduler: RecoveringScheduler | None = None
        self.connector_worker: RecoveringWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            recompute_failed_loads(_transfer_config(vllm_config))
            self.connector_scheduler = RecoveringScheduler(spec, framed, kv_cache_config)
        else:
            self.connector_worker = RecoveringWorker(spec, framed, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take note of the device's blocks, which loads have to leave room in."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.connector_scheduler is not None:
            speculation = self._vllm_config.speculative_config
            ahead = 1 + 2 * speculation.num_speculative_tokens if speculation is not None else 0
            self.connector_scheduler.bind_room(Room(kv_cache_manager, tokens_ahead=ahead))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, well or not."""
        return self._worker.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the device blocks that were to be loaded and were not; their tokens are computed."""
        return self._worker.take_bad_blocks()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: no layer waits for a transfer. Where vLLM asks, mistakes show before the model loads."""
        OffloadConfig.parse(extra_config).for_vllm()
        return False

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return vLLM's metrics of the offloading connector, with those that our spec adds."""
        framed = _with_spec(vllm_config)
        return super().build_prom_metrics(framed, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _worker(self) -> RecoveringWorker:
        assert self.connector_worker is not None
        return self.connector_worker


def _with_spec(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of the configuration with every option filled in and our spec named, as vLLM's frame reads it."""
    transfer = _transfer_config(vllm_config)
    options = OffloadConfig.parse(transfer.kv_connector_extra_config)
    _refuse_new_weights(vllm_config, options.secondary_tiers)
    framed = copy.copy(vllm_config)
    ours = {"spec_name": _SPEC, SETTINGS: settings_digest(vllm_config.model_config)}
    framed.kv_transfer_config = dataclasses.replace(transfer, kv_connector_extra_config=options.for_vllm() | ours)
    framed.parallel_config = _with_name_of_executor(vllm_config)
    return framed


def _with_name_of_executor(vllm_config: VllmConfig) -> ParallelConfig:
    """Return a copy of the configuration of ranks, with ``mp`` for every executor that is vLLM's ``mp`` or made of it.

    vLLM's frame lets ranks share chunks of host memory where the executor's name is that; npu-platform's has its own.
    """
    parallel = copy.copy(vllm_config.parallel_config)
    if not parallel.use_ray and issubclass(Executor.get_class(vllm_config), MultiprocExecutor):
        parallel.distributed_executor_backend = "mp"
    return parallel


def as_laid_out_here(config: OffloadingConfig) -> OffloadingConfig:
    """Return vLLM's description of a deployment, with what our worker does differently put right.

    vLLM calls a model's chunks portable where all ranks' bytes, one rank after another, are those of any number of
    ranks. Tiers share such chunks between engines of different sizes. Our worker lays out all layers of a rank before
    the next rank's, so its chunks are portable in the canonical layout alone; others would be taken for what they are
    not, and a checksum does not notice that.
    """
    if config.canonical_layout or not config.parallel.is_parallelism_agnostic:
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, is_parallelism_agnostic=False))


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    role = _transfer_config(vllm_config).kv_role
    if role != "kv_both":
        msg = f'{CONNECTOR} stores and loads in the same engine; kv_role must be "kv_both", not {role!r}'
        raise UnsupportedError(msg)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        msg = f"{CONNECTOR} does not support sparse attention with blocks on the host; use vLLM's HiSparseConnector"
        raise UnsupportedError(msg)


def _refuse_new_weights(vllm_config: VllmConfig, tiers: list[dict[str, Any]]) -> None:
    """Refuse tiers that outlive the weights they were filled with: they know a model by those of the start."""
    lasting = [tier["type"] for tier in tiers if tier["type"] in _LASTING]
    if lasting and vllm_config.weight_transfer_config is not None:
        msg = (
            "a trainer's new weights (--weight-transfer-config) would read what the old ones computed, "
            f"from the {lasting[0]} tier; leave one of them out"
        )
        raise UnsupportedError(msg)


def _transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    return cast("KVTransferConfig", vllm_config.kv_transfer_config)  # without one there would be no connector
