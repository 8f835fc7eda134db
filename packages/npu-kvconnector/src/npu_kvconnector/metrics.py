"""The figures that this package adds to vLLM's of the offloading connector: names, kinds and what they say.

vLLM's frame ships them from the scheduler in the step's KV connector stats and shows them at ``/metrics``. Labels:
``tier`` is "0:primary" for the host's, and "1:durable" and so on for those behind it, as vLLM counts them;
``operation`` is "load", "store" or, of tiers that peers ask for blocks, "serve".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

__all__ = [
    "BREAKER_OPENED",
    "BREAKER_STATE",
    "DEFINITIONS",
    "FAILED_CALLS",
    "HOST_LABEL",
    "OVERDUE_JOBS",
    "RECOMPUTED_BLOCKS",
    "SKIPPED_CHUNKS",
]

BREAKER_STATE = "vllm:kv_offload_tiering_breaker_state"
BREAKER_OPENED = "vllm:kv_offload_tiering_breaker_opened"
SKIPPED_CHUNKS = "vllm:kv_offload_tiering_skipped_chunks"
OVERDUE_JOBS = "vllm:kv_offload_tiering_overdue_jobs"
FAILED_CALLS = "vllm:kv_offload_tiering_failed_calls"
RECOMPUTED_BLOCKS = "vllm:kv_offload_recomputed_blocks"

HOST_LABEL = "0:primary"
"""The host tier, as vLLM labels it."""

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    BREAKER_STATE: OffloadingGaugeMetadata(
        documentation="State of a tier's circuit breaker: 0 closed, 1 half-open, 2 open (the tier is skipped).",
        labelnames=("tier", "operation"),
    ),
    BREAKER_OPENED: OffloadingCounterMetadata(
        documentation="How often a tier's circuit breaker has opened.", labelnames=("tier", "operation")
    ),
    SKIPPED_CHUNKS: OffloadingCounterMetadata(
        documentation="Chunks that were not asked for or not stored: breaker open, too much pending, or failed lately.",
        labelnames=("tier", "operation"),
    ),
    OVERDUE_JOBS: OffloadingCounterMetadata(
        documentation="Transfers of a tier that outlasted their deadline.", labelnames=("tier", "operation")
    ),
    FAILED_CALLS: OffloadingCounterMetadata(
        documentation="Calls of a tier that raised, or kept the scheduler too long.", labelnames=("tier", "call")
    ),
    RECOMPUTED_BLOCKS: OffloadingCounterMetadata(
        documentation="KV blocks that a tier had and did not deliver, so that their tokens are computed.",
        labelnames=("tier",),
    ),
}
