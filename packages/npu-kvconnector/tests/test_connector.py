"""NPUOffloadConnector: options and deployments that are refused before anything is allocated."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="the connector is a subclass of vLLM's; install npu-kvconnector[vllm]")

from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig, WeightTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from npu_kvconnector import register
from npu_kvconnector.compat import recompute_failed_loads
from npu_kvconnector.config import GuardConfig
from npu_kvconnector.connector import NPUOffloadConnector, _with_spec, as_laid_out_here
from npu_kvconnector.errors import CapacityError, OptionError, UnsupportedError
from npu_kvconnector.fingerprint import fingerprint
from npu_kvconnector.spec import NPUTieringSpec

NO_CACHE = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])


def test_wrong_options_are_refused_when_vllm_asks_about_graphs() -> None:
    with pytest.raises(OptionError, match="did you mean 'cpu_bytes_to_use'"):
        NPUOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_us": 1})
    assert not NPUOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": "1GiB"})


def vllm_config(role: str = "kv_both", **options: object) -> VllmConfig:
    """Return a configuration with a device, so that it needs no platform."""
    register()
    connector = {"kv_connector": "NPUOffloadConnector", "kv_connector_extra_config": options}
    return VllmConfig(device_config=DeviceConfig("cpu"), kv_transfer_config=KVTransferConfig(kv_role=role, **connector))


def test_a_one_sided_role_is_refused() -> None:
    with pytest.raises(UnsupportedError, match='kv_role must be "kv_both"'):
        NPUOffloadConnector(vllm_config(role="kv_producer"), KVConnectorRole.SCHEDULER, NO_CACHE)


def offloading_config(cpu_bytes: int, **options: object) -> OffloadingConfig:
    """Two workers, blocks of 8 KiB in each."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": cpu_bytes, **options},
        engine_id=f"test-{uuid.uuid4()}",
        model=OffloadingModelConfig(name="model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def test_the_tier_is_sized_in_whole_chunks_of_all_workers() -> None:
    assert NPUTieringSpec(offloading_config(10 * 32768 + 1)).num_chunks == 10


def test_a_tier_below_one_chunk_is_refused() -> None:
    with pytest.raises(CapacityError, match="holds no chunk: one takes 32768 bytes"):
        NPUTieringSpec(offloading_config(32767))


def test_caches_are_registered_once_and_within_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = NPUTieringSpec(offloading_config(10 * 32768))
    page = 8192 + 1  # a byte more a block than the tier was sized for
    tensor = torch.zeros(4, page, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page)]])
    with pytest.raises(AssertionError, match="exceeds worker area"):
        spec.get_worker(caches)
    with pytest.raises(UnsupportedError, match="registered twice"):
        spec.get_worker(caches)
    assert not list(Path("/dev/shm").glob(f"*{spec.config.engine_id}*"))


def test_a_tier_that_cannot_be_made_leaves_nothing_behind() -> None:
    tiers = [{"type": "example"}, {"type": "example", "no_such_option": 1}]
    spec = NPUTieringSpec(offloading_config(10 * 32768, secondary_tiers=tiers))
    with pytest.raises(TypeError, match="no_such_option"):
        spec.get_manager()
    assert not list(Path("/dev/shm").glob(f"*{spec.config.engine_id}*"))


def test_chunks_of_other_sizes_are_shared_in_the_canonical_layout_alone() -> None:
    """vLLM's `fs`, `obj` and `p2p` tiers share what is called portable, and ours what has one fingerprint."""
    config = offloading_config(1 << 20)
    called = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, is_parallelism_agnostic=True))
    canonical = dataclasses.replace(called, canonical_layout=True, kv_cache_layout="BLNHC")
    assert not as_laid_out_here(called).parallel.is_parallelism_agnostic
    assert as_laid_out_here(canonical).parallel.is_parallelism_agnostic
    one = dataclasses.replace(called.parallel, tp_size=1, world_size=1)
    for each, is_shared in ((called, False), (canonical, True)):
        sizes = (as_laid_out_here(each), as_laid_out_here(dataclasses.replace(each, parallel=one)))
        prints = {fingerprint(size, block_bytes=4096, revision="r") for size in sizes}
        assert len(prints) == (1 if is_shared else 2)


@pytest.mark.parametrize("tier", [{"type": "durable", "path": "/x", "bytes": 1}, {"type": "remote", "url": "s3://b/p"}])
def test_new_weights_beside_a_tier_that_lasts_are_refused(tier: dict[str, object]) -> None:
    options = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}
    config = vllm_config()
    config.kv_transfer_config = dataclasses.replace(config.kv_transfer_config, kv_connector_extra_config=options)
    _with_spec(config)
    config.weight_transfer_config = WeightTransferConfig(backend="nccl")
    with pytest.raises(UnsupportedError, match=f"from the {tier['type']} tier; leave one of them out"):
        _with_spec(config)


class ExecutorOfAnotherName(MultiprocExecutor):
    """As a platform may have one."""


@pytest.mark.parametrize(
    ("executor", "name"), [(f"{__name__}.ExecutorOfAnotherName", "mp"), ("mp", "mp"), ("ray", "ray"), ("uni", "uni")]
)
def test_ranks_share_memory_whatever_the_name_of_their_executor(executor: str, name: str) -> None:
    """What vLLM's frame asks for."""
    config = vllm_config(cpu_bytes_to_use=1 << 20)
    config.parallel_config.distributed_executor_backend = executor
    assert _with_spec(config).parallel_config.distributed_executor_backend == name
    assert config.parallel_config.distributed_executor_backend == executor


def test_tiers_are_guarded_with_their_own_settings_first() -> None:
    tiers = [{"type": "example", "guard": {"failures": 2}}, {"type": "example", "custom_param": 3}]
    spec = NPUTieringSpec(
        offloading_config(10 * 32768, secondary_tiers=tiers, guard={"failures": 7, "load_seconds": 3})
    )
    manager = spec.get_manager()
    assert [tier._config for tier in manager.secondary_tiers] == [
        GuardConfig(failures=2, load_seconds=3),
        GuardConfig(failures=7, load_seconds=3),
    ]
    assert [tier.tier_type for tier in manager.secondary_tiers] == ["example", "example"]
    manager.shutdown()


def test_failed_loads_are_computed_whatever_the_policy_says() -> None:
    transfer = KVTransferConfig(kv_connector="NPUOffloadConnector", kv_role="kv_both")
    assert transfer.kv_load_failure_policy == "fail"
    recompute_failed_loads(transfer)
    assert transfer.kv_load_failure_policy == "recompute"
