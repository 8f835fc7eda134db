"""NPUOffloadConnector: vLLM's offloading connector with this distribution's host tier as its medium.

vLLM's connector decides what to store, to load and to evict, fences transfers against the reuse of blocks (preemption,
abort) and reports the statistics. What it lacks is a worker for devices other than CUDA and XPU: that is here.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from npu_kvconnector import CONNECTOR
from npu_kvconnector.config import OffloadConfig
from npu_kvconnector.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NPUOffloadConnector"]

_SPEC = "NPUHostTierSpec"
OffloadingSpecFactory.register_spec(_SPEC, "npu_kvconnector.spec", _SPEC)


class NPUOffloadConnector(OffloadingConnector):
    """Keeps KV blocks in host memory, on any device that vLLM runs on."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build the scheduler's or the worker's half.

        Raises:
            OptionError: ``kv_connector_extra_config`` is wrong.
            UnsupportedError: the deployment cannot be served.
            CapacityError: the host tier would hold no chunk.
        """
        _refuse_unsupported(vllm_config, kv_cache_config)
        super().__init__(_with_spec(vllm_config), role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: no layer waits for a transfer. Where vLLM asks, mistakes show before the model loads."""
        OffloadConfig.parse(extra_config)
        return False

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return vLLM's metrics of the offloading connector, defined by our spec."""
        framed = _with_spec(vllm_config)
        return super().build_prom_metrics(framed, metric_types, labelnames, per_engine_labelvalues)


def _with_spec(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of the configuration with every option filled in and our spec named, as vLLM's frame reads it."""
    transfer = _transfer_config(vllm_config)
    options = OffloadConfig.parse(transfer.kv_connector_extra_config)
    framed = copy.copy(vllm_config)
    framed.kv_transfer_config = dataclasses.replace(
        transfer,
        kv_connector_extra_config=dataclasses.asdict(options) | {"spec_name": _SPEC},
    )
    return framed


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    role = _transfer_config(vllm_config).kv_role
    if role != "kv_both":
        msg = f'{CONNECTOR} stores and loads in the same engine; kv_role must be "kv_both", not {role!r}'
        raise UnsupportedError(msg)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        # Stages hold different layers, so the scheduler, which sees the first, could promise chunks others lack.
        msg = f"{CONNECTOR} does not support pipeline parallelism ({stages} stages); use --tensor-parallel-size instead"
        raise UnsupportedError(msg)
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups):
        # A state is one for all tokens before it: a hit would need the very block boundary that it was stored at.
        msg = f"{CONNECTOR} does not support models with states (Mamba and the like); serve them without it"
        raise UnsupportedError(msg)
    if kv_cache_config.hisparse_host_num_blocks is not None:
        msg = f"{CONNECTOR} does not support sparse attention with blocks on the host; use vLLM's HiSparseConnector"
        raise UnsupportedError(msg)


def _transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    return cast("KVTransferConfig", vllm_config.kv_transfer_config)  # without one there would be no connector
