"""Which device a rank takes, and how many threads: what vLLM and the user have said, with real configurations."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ParallelConfig
from vllm.platforms import interface
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker

from npu_platform.errors import ConfigurationError
from npu_platform.memory_ledger import cache_size_named
from npu_platform.start_times import StartTimes
from npu_platform.worker import NPUWorker

COUNT = torch.accelerator.device_count()


@pytest.fixture(autouse=True)
def nothing_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps what is assigned in a global of the process."""
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)


def worker(local_rank: int = 0, **parallel: Any) -> NPUWorker:
    made = NPUWorker.__new__(NPUWorker)
    made.parallel_config = ParallelConfig(**parallel)
    made.local_rank = local_rank
    made.npu_config = SimpleNamespace(num_threads=None)
    return made


SECOND_OF_TWO = {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_rank_local": 1}


@pytest.mark.parametrize(
    ("parallel", "first"),
    [
        pytest.param({}, 0, id="alone"),
        pytest.param(SECOND_OF_TWO, 1, id="replica-in-a-process-of-its-user"),
        pytest.param(SECOND_OF_TWO | {"tensor_parallel_size": 2}, 2, id="replica-of-two-ranks"),
        pytest.param(SECOND_OF_TWO | {"assigned_physical_gpu_ids": [1]}, 0, id="replica-that-vllm-started"),
        pytest.param(SECOND_OF_TWO | {"assigned_physical_gpu_ids": [2, 3]}, 1, id="device-ids-for-both"),
        pytest.param({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, 0, id="two-hosts"),
        pytest.param(SECOND_OF_TWO | {"distributed_executor_backend": "external_launcher"}, 0, id="torchrun"),
    ],
)
def test_first_device_of_an_engine(parallel: dict[str, Any], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # torchrun's
    assert worker(**parallel)._first_of_engine() == first


@pytest.mark.parametrize(
    ("stages", "attention_free", "latent", "of_attention"),
    [(1, False, False, False), (2, False, False, True), (2, True, False, False), (2, False, True, False)],
)
def test_a_stage_without_attention_lays_caches_out_as_the_others(
    stages: int, attention_free: bool, latent: bool, of_attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What vLLM says of a stage with no layer that prefers one, but in another order.
    any_layout = [layout.name for layout in reversed(KVCacheLayout)]
    monkeypatch.setattr(Worker, "get_supported_kv_cache_layouts", lambda _: any_layout)
    rank = worker(pipeline_parallel_size=stages, distributed_executor_backend="mp")
    rank.model_config = SimpleNamespace(is_attention_free=attention_free, use_mla=latent)
    assert rank.get_supported_kv_cache_layouts() == (["LBHNC", "LBNHC"] if of_attention else any_layout)


def test_ray_has_chosen_the_devices_itself() -> None:
    replica = worker(**SECOND_OF_TWO)
    replica.parallel_config.data_parallel_backend = "ray"  # which cannot be configured where Ray is not installed
    assert replica._first_of_engine() == 0


def test_the_assigned_device_is_taken() -> None:
    assert worker(0, assigned_physical_gpu_ids=[COUNT - 1])._visible_device() == COUNT - 1
    assert interface.get_assigned_physical_gpu_ids() == [COUNT - 1]


@pytest.mark.parametrize(
    ("local_rank", "parallel", "said"),
    [
        pytest.param(COUNT, {}, f"this process sees {COUNT}", id="more ranks than devices"),
        pytest.param(
            COUNT,
            {"tensor_parallel_size": COUNT + 3},
            rf"more in NPU_VISIBLE_DEVICES; on .* at least {COUNT + 3}\.",
            id="as many as all ranks need",
        ),
        pytest.param(1, {"assigned_physical_gpu_ids": [0]}, r"--device-ids assigns \[0\]", id="more ranks than ids"),
        pytest.param(0, {"assigned_physical_gpu_ids": [COUNT]}, f"npu device {COUNT} is not there", id="no such id"),
    ],
)
def test_a_device_that_is_not_there_is_refused(local_rank: int, parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        worker(local_rank, **parallel)._visible_device()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_memory_bytes": 1 << 50}, "--kv-cache-memory-bytes=1125899906842624 says: give less"),
        ({"kv_cache_memory_bytes": 9, "num_gpu_blocks_override": 7}, "--num-gpu-blocks-override=7 says: give less"),
        ({}, r"NPU_SIMULATOR_MEMORY\.$"),
    ],
)
@pytest.mark.parametrize("step", ["initialize_from_config", "compile_or_warm_up_model"])
def test_a_cache_that_leaves_no_memory_is_told_with_its_flag(
    step: str, settings: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, step, lambda *_: torch.empty(1 << 50, device="npu"))
    rank = worker()
    rank.device, rank.start_times, rank.cache_config = torch.device("npu:0"), StartTimes(), CacheConfig(**settings)
    rank.use_v2_model_runner = False
    with pytest.raises(torch.OutOfMemoryError, match=said):
        getattr(rank, step)(*[SimpleNamespace()][: step == "initialize_from_config"])


def test_an_op_that_finds_no_memory_beside_a_cache_is_told_with_its_flag() -> None:
    found, another = "NPU out of memory. Tried to allocate 2 KiB.", "another"
    cache = CacheConfig(kv_cache_memory_bytes=9)
    with pytest.raises(torch.OutOfMemoryError, match=f"{found}\nThe KV cache"), cache_size_named(cache):
        raise RuntimeError(found)
    with pytest.raises(RuntimeError, match="^another$"), cache_size_named(cache):
        raise RuntimeError(another)


SOCKETS = [("host", frozenset(range(32))), ("host", frozenset(range(32, 64)))]


def test_a_launcher_that_started_another_number_of_ranks_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of vLLM would wait for those that nobody started, or end with a sentence of gloo's."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as this configuration itself sets it
    launched = {"distributed_executor_backend": "external_launcher"}
    for ranks in (1, 4):
        said = f"started 2 processes .WORLD_SIZE., and the layout has {ranks} ranks: start as many"
        with pytest.raises(ConfigurationError, match=said):
            worker(0, **launched, tensor_parallel_size=ranks)._init_device()
    worker(0, **launched, tensor_parallel_size=2)._check_launcher()
    worker(0, tensor_parallel_size=4)._check_launcher()  # a variable of somebody else's


def test_a_rank_with_a_socket_of_its_own_has_all_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", raising=False)
    assert worker(tensor_parallel_size=2)._num_threads(SOCKETS[0], SOCKETS) == 32
    both = ("host", SOCKETS[0][1] | SOCKETS[1][1])
    assert worker(tensor_parallel_size=2)._num_threads(both, [both, both]) == 32


def test_threads_are_shared_with_replicas_that_only_vllm_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a replica of a dense model believe that it is alone; OMP_NUM_THREADS then has its share of cores."""
    monkeypatch.delenv("NPU_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    alone = (SOCKETS[0], SOCKETS[:1])
    assert worker()._num_threads(*alone) == 32, "the user's variable is for torch's kernels"
    monkeypatch.setenv("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "1")
    assert worker()._num_threads(*alone) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "128")
    assert worker()._num_threads(*alone) == 32


@pytest.mark.parametrize(
    ("rank", "parallel", "ends"),
    [
        pytest.param(0, {}, False, id="alone"),
        pytest.param(0, {"tensor_parallel_size": 2}, False, id="answers"),
        pytest.param(1, {"tensor_parallel_size": 2}, True, id="second-of-tensor-parallel"),
        pytest.param(0, {"pipeline_parallel_size": 2}, True, id="first-stage"),
        pytest.param(1, {"pipeline_parallel_size": 2}, False, id="last-stage"),
        pytest.param(3, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, True, id="second-of-last-stage"),
    ],
)
def test_a_rank_whose_error_nobody_would_hear_ends(rank: int, parallel: dict[str, Any], ends: bool) -> None:
    failed = worker(distributed_executor_backend="mp", **parallel)
    failed.rank = rank
    error = RuntimeError("a kernel failed")
    for backend in ("mp", "ray"):
        failed.parallel_config.distributed_executor_backend = backend
        with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
            failed._end_if_nobody_hears(error)
    failed.parallel_config.distributed_executor_backend = "external_launcher"
    failed._end_if_nobody_hears(error)
