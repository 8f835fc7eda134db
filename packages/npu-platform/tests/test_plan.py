"""What each rank of a server would get, from real configurations of ranks, and `npu doctor --plan` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig

from npu_platform import doctor, numa, plan
from npu_platform.demo import MODEL

CORES = {0: list(range(8)), 1: list(range(8, 16))}


@pytest.fixture(autouse=True)
def two_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: CORES)
    monkeypatch.delenv("NPU_NUM_THREADS", raising=False)


def planned(additional_config: dict[str, Any] | None = None, **parallel: Any) -> list[plan.Rank]:
    cache = SimpleNamespace(gpu_memory_utilization=0.5)
    config: Any = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel), cache_config=cache, additional_config=additional_config or {}
    )
    return plan.planned(config)


def test_ranks_have_a_device_each_and_share_the_cores() -> None:
    ranks = planned(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [(rank.replica, rank.stage, rank.part, rank.device) for rank in ranks] == [
        (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 1, 3),
    ]  # fmt: skip
    assert {(rank.nodes, rank.threads) for rank in ranks} == {((0, 1), 4)}
    assert ranks[0].memory == torch.npu.mem_get_info()[1] // 2


def test_ranks_that_are_bound_have_the_cores_of_their_node() -> None:
    ranks = planned(tensor_parallel_size=2, numa_bind=True, numa_bind_nodes=[1, 0])
    assert [(rank.nodes, rank.threads) for rank in ranks] == [((1,), 8), ((0,), 8)]
    assert "memory node 1, 8 threads" in ranks[0].share()


def test_replicas_come_after_each_other_and_take_the_devices_that_were_named() -> None:
    ranks = planned(data_parallel_size=2, data_parallel_size_local=2, assigned_physical_gpu_ids=[3, 1])
    assert [(rank.replica, rank.device, rank.threads) for rank in ranks] == [(0, 3, 8), (1, 1, 8)]


def test_a_host_of_two_starts_its_own_ranks() -> None:
    two_hosts = {"tensor_parallel_size": 4, "nnodes": 2, "node_rank": 1, "distributed_executor_backend": "mp"}
    assert [(rank.part, rank.device) for rank in planned(**two_hosts)] == [(2, 0), (3, 1)]


def test_the_users_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned({"npu": {"num_threads": 3}})[0].threads == 3
    monkeypatch.setenv("NPU_NUM_THREADS", "1")
    assert planned()[0].threads == torch.npu.get_num_threads()


def test_a_device_that_is_not_there_is_a_problem() -> None:
    count = torch.npu.device_count()
    found = list(doctor._plan([str(MODEL), "--tensor-parallel-size", "1", "--pipeline-parallel-size", str(count + 1)]))
    assert [finding.ok for finding in found] == [True] * count + [False]
    assert found[count].name == f"replica 0, stage {count}, part 0"
    assert f"NPU_SIMULATOR_DEVICES to {count + 1}" in (found[count].remedy or "")


@pytest.mark.nightly
def test_doctor_plans_and_misses_a_device() -> None:
    program = "import sys; from npu_platform.cli import main; sys.exit(main(sys.argv[1:]))"
    served = ["--plan", "--", str(MODEL), "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    environ = os.environ | {"NPU_SIMULATOR_DEVICES": "3"}
    command = [sys.executable, "-c", program, "doctor", "--json", *served]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["section"] == "plan"]
    assert [finding["ok"] for finding in found] == [True, True, True, False]
    assert found[2]["name"] == "replica 0, stage 1, part 0"
    assert found[2]["detail"].startswith("npu:2, memory node")
    assert "NPU_SIMULATOR_DEVICES to 4" in found[3]["remedy"]
