"""NPUOffloadConnector: options and deployments that are refused before anything is allocated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="the connector is a subclass of vLLM's; install npu-kvconnector[vllm]")

from vllm.config import DeviceConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from npu_kvconnector import register
from npu_kvconnector.connector import NPUOffloadConnector
from npu_kvconnector.errors import CapacityError, OptionError, UnsupportedError
from npu_kvconnector.spec import NPUHostTierSpec

NO_CACHE = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])


def test_wrong_options_are_refused_when_vllm_asks_about_graphs() -> None:
    with pytest.raises(OptionError, match="did you mean 'cpu_bytes_to_use'"):
        NPUOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_us": 1})
    assert not NPUOffloadConnector.requires_piecewise_for_cudagraph({"cpu_bytes_to_use": "1GiB"})


def vllm_config(role: str = "kv_both", stages: int = 1) -> VllmConfig:
    """Return a configuration with a device, so that it needs no platform."""
    register()
    return VllmConfig(
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="NPUOffloadConnector", kv_role=role),
        parallel_config=ParallelConfig(pipeline_parallel_size=stages, distributed_executor_backend="mp"),
    )


def test_a_one_sided_role_is_refused() -> None:
    with pytest.raises(UnsupportedError, match='kv_role must be "kv_both"'):
        NPUOffloadConnector(vllm_config(role="kv_producer"), KVConnectorRole.SCHEDULER, NO_CACHE)


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="2 stages"):
        NPUOffloadConnector(vllm_config(stages=2), KVConnectorRole.WORKER, NO_CACHE)


def test_models_with_states_are_refused() -> None:
    spec = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with pytest.raises(UnsupportedError, match="models with states"):
        NPUOffloadConnector(vllm_config(), KVConnectorRole.SCHEDULER, cache)


def offloading_config(cpu_bytes: int) -> OffloadingConfig:
    """Two workers, blocks of 8 KiB in each."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": cpu_bytes},
        engine_id="engine",
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
    assert NPUHostTierSpec(offloading_config(10 * 32768 + 1)).num_chunks == 10


def test_a_tier_below_one_chunk_is_refused() -> None:
    with pytest.raises(CapacityError, match="holds no chunk: one takes 32768 bytes"):
        NPUHostTierSpec(offloading_config(32767))


def test_a_worker_takes_its_share_of_the_tier_and_no_more() -> None:
    spec = NPUHostTierSpec(offloading_config(10 * 32768))
    page = 8192 + 1  # a byte more a block than the tier was sized for
    tensor = torch.zeros(4, page, dtype=torch.int8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, page)]])
    with pytest.raises(CapacityError, match=f"more than this worker's share of {5 * 32768} bytes"):
        spec.get_worker(caches)
