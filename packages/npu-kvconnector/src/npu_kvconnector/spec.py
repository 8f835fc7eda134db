"""NPUTieringSpec: what vLLM's offloading frame asks for, a manager of the tiers and a worker for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from npu_kvconnector import metrics
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.errors import CapacityError, UnsupportedError
from npu_kvconnector.frame.manager import HostTier, TierManager
from npu_kvconnector.tiers.guard import GuardedTier
from npu_kvconnector.tiers.host import HostRegion
from npu_kvconnector.worker import HostTierWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["TIERS", "NPUTieringSpec"]

logger = init_logger("vllm.npu_kvconnector")

TIERS = {
    "durable": ("npu_kvconnector.tiers.durable.manager", "DurableTierManager"),
    "remote": ("npu_kvconnector.tiers.remote.manager", "RemoteTierManager"),
    "p2p_tcp": ("npu_kvconnector.tiers.tcp.manager", "TcpTierManager"),
}
"""The types of secondary tier that this package brings."""

for _type, (_module, _class) in TIERS.items():
    SecondaryTierFactory.register_tier(_type, _module, _class)


class NPUTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers (sizes, index, eviction, metrics, those behind the host), on any device, each behind a guard."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return vLLM's metrics, those of the tiers, and the guard's."""
        return {**super().build_metric_definitions(extra_config), **metrics.DEFINITIONS}

    def __init__(self, config: OffloadingConfig) -> None:
        """Size the tier.

        Raises:
            CapacityError: ``cpu_bytes_to_use`` is less than one chunk.
        """
        super().__init__(config)
        self._manager: TierManager | None = None
        self._has_worker = False
        if self.num_chunks < 1:
            msg = (
                f"cpu_bytes_to_use={config.extra_config['cpu_bytes_to_use']} holds no chunk: "
                f"one takes {self.kv_bytes_per_chunk} bytes; raise it, or lower blocks_per_chunk"
            )
            raise CapacityError(msg)

    def get_manager(self) -> TierManager:
        """Return the manager of all tiers, made at the first call.

        Raises:
            CapacityError: the host tier cannot be had.
            ValueError: a tier's type is unknown, or its options are wrong.
        """
        if self._manager is None:
            region = self._take_region(rank=None)
            if not region.is_creator:
                region.forget_name()
            host = self._make_host_tier(region)
            tiers: list[GuardedTier] = []
            try:
                for number in range(len(self.secondary_tier_configs)):
                    tiers.append(self._make_tier(number, host))  # noqa: PERF401  # those made are shut down below
            except Exception:
                for tier in tiers:
                    tier.shutdown()
                host.shutdown()
                raise
            self._manager = TierManager(host, tiers, blocks_per_chunk=self.blocks_per_chunk)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker over the registered caches, with its host memory taken.

        Raises:
            UnsupportedError: caches are registered a second time; what the tier holds would no longer be known.
            CapacityError: the host has less memory available.
        """
        if self._has_worker:
            msg = "the KV caches of this worker were registered twice; restart the engine to change them"
            raise UnsupportedError(msg)
        self._has_worker = True
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        region = self._take_region(rank=0 if self.replicated_layout else self.config.parallel.rank)
        try:
            return HostTierWorker(kv_caches, region, blocks_per_chunk=self.blocks_per_chunk, canonical=canonical)
        except Exception:
            region.cleanup()
            raise

    def _take_region(self, rank: int | None) -> HostRegion:
        return HostRegion(
            self._engine_id,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )

    def _make_host_tier(self, region: HostRegion) -> HostTier:
        return HostTier(
            region,
            eviction_policy=self.eviction_policy,
            cache_policy_module_path=self.cache_policy_module_path,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            store_threshold=int(self.extra_config.get("store_threshold", 0)),
            max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
        )

    def _make_tier(self, number: int, host: HostTier) -> GuardedTier:
        """Return a tier of ``secondary_tiers`` behind its guard."""
        options = dict(self.secondary_tier_configs[number])
        said = {**self.extra_config.get("guard", {}), **options.pop("guard", {})}
        guard = GuardConfig.parse(said)
        if options["type"] == "p2p":
            logger.info("P2P tier: vLLM's own, over NIXL, unencrypted")  # ours over TCP says so itself
        tier = SecondaryTierFactory.create_secondary_tier(options, host.get_kv_memoryview(), self)
        return GuardedTier(
            tier,
            guard,
            label=f"{number + 1}:{tier.tier_type}",
            num_chunks=self.num_chunks,
            blocks_per_chunk=self.blocks_per_chunk,
            # An answer of one peer says nothing of another's, which may still compute what it is asked for.
            learns="lookup_seconds" not in said and not options["type"].startswith("p2p"),
        )
