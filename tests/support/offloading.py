"""vLLM's description of a deployment with an offloading connector, as its factory makes it, for tests without an engine."""

from __future__ import annotations

import uuid
from typing import Any

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

__all__ = ["offloading_config"]


def offloading_config(
    *,
    block_bytes: int = 4096,
    model: str = "model",
    dtype: str = "bfloat16",
    enable_kv_cache_events: bool = False,
    **extra: Any,
) -> OffloadingConfig:
    """Return that of one worker with one group of two layers, blocks of 16 tokens and ``block_bytes`` bytes."""
    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": 1, "rank": 0}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=enable_kv_cache_events,
        extra_config={"cpu_bytes_to_use": 64 * block_bytes, **extra},
        engine_id=f"test-{uuid.uuid4()}",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            **parallel,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
