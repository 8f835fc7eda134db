"""Memory nodes, the ranks bound to them and the cores that a rank has, with faked trees and with masks of taskset."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import ParallelConfig

from npu_platform import numa

if TYPE_CHECKING:
    from pathlib import Path

ALL = range(17)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two sockets with two threads a core, a node of memory alone, and a late one; and what is no node."""
    lists = {"node0": "0-3,8-11", "node1": "4-7,12-15", "node2": "", "node10": "16", "power": "0", "nodes": "0"}
    for name, processors in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{processors}\n")
    return tmp_path


def test_nodes_are_those_with_processors_of_ours(tree: Path) -> None:
    assert numa.nodes(ALL, tree) == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15], 10: [16]}
    assert numa.nodes({3, 4, 5}, tree) == {0: [3], 1: [4, 5]}
    assert numa.nodes({4, 5}, tree) == {1: [4, 5]}


def test_a_host_that_does_not_tell_has_one_node(tree: Path) -> None:
    assert numa.nodes({5, 2}, tree / "nowhere") == {0: [2, 5]}
    assert numa.nodes({77}, tree) == {0: [77]}


def test_a_mask_of_taskset_counts() -> None:
    last = max(os.sched_getaffinity(0))
    program = "from npu_platform import numa; print(numa.nodes(), sorted(numa.where()[1]))"
    done = subprocess.run(
        ["taskset", "-c", str(last), sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    (node,) = numa.nodes({last})
    assert done.stdout.strip() == f"{{{node}: [{last}]}} [{last}]"


@pytest.mark.parametrize(
    ("parallel", "bound"),
    [
        pytest.param({}, [0], id="one-rank"),
        pytest.param({"tensor_parallel_size": 2}, [0, 10], id="one-a-node"),
        pytest.param({"tensor_parallel_size": 4}, [0, 10, 0, 10], id="more-ranks-than-nodes"),
        pytest.param({"data_parallel_size": 2, "data_parallel_size_local": 2}, [0, 10], id="replicas"),
        pytest.param(
            {"data_parallel_size": 3, "data_parallel_size_local": 1, "data_parallel_rank": 2}, [0, 10, 0], id="third"
        ),
    ],
)
def test_ranks_take_nodes_in_turn(parallel: dict[str, Any], bound: list[int]) -> None:
    config = ParallelConfig(numa_bind=True, **parallel)
    numa.bind_ranks(config, [10, 0])
    assert config.numa_bind_nodes == bound


def test_what_the_user_named_stays() -> None:
    named = ParallelConfig(numa_bind=True, numa_bind_nodes=[3])
    numa.bind_ranks(named, [0, 1])
    assert named.numa_bind_nodes == [3]
    unbound = ParallelConfig()
    numa.bind_ranks(unbound, [0, 1])
    assert unbound.numa_bind_nodes is None


@pytest.mark.parametrize(
    ("masks", "cores"),
    [
        pytest.param([range(64)], 64, id="alone"),
        pytest.param([range(64), range(64)], 32, id="one-mask-for-both"),
        pytest.param([range(32), range(32, 64)], 32, id="a-socket-each"),
        pytest.param([range(32), range(32), range(32, 64), range(32, 64)], 16, id="two-a-socket"),
        pytest.param([range(6), range(4, 8)], 5, id="two-in-common"),
        pytest.param([range(2)] * 5, 1, id="more-ranks-than-cores"),
        pytest.param([range(7)] * 7, 1, id="exactly"),
    ],
)
def test_cores_are_shared_by_the_ranks_that_may_use_them(masks: list[range], cores: int) -> None:
    ranks = [("host", frozenset(mask)) for mask in masks]
    assert numa.cores_of_rank(ranks[0], ranks) == cores
    assert numa.cores_of_rank(ranks[0], [*ranks, ("another", frozenset(masks[0]))]) == cores


@pytest.mark.parametrize(
    ("parallel", "given", "npu"),
    [
        pytest.param({"data_parallel_size": 2}, {}, {"num_threads": 4}, id="two"),
        pytest.param(
            {"data_parallel_size": 2, "tensor_parallel_size": 2},
            {"sampler": "torch"},
            {"sampler": "torch", "num_threads": 2},
            id="of-two-ranks-each",
        ),
        pytest.param({"data_parallel_size": 2}, {"num_threads": 3}, {"num_threads": 3}, id="the-user's"),
        pytest.param({"data_parallel_size": 20}, {}, {"num_threads": 1}, id="more-than-cores"),
        pytest.param({"data_parallel_size": 2, "numa_bind": True}, {}, {}, id="each-on-its-memory-node"),
        pytest.param({}, {}, {}, id="one"),
    ],
)
def test_replicas_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], given: dict[str, Any], npu: dict[str, Any]
) -> None:
    monkeypatch.delenv("NPU_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    local = {"data_parallel_size_local": parallel.get("data_parallel_size", 1)}
    config = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel, **local), additional_config={"others": 1, "npu": given}
    )
    numa.share_among_replicas(config)
    assert config.additional_config == {"others": 1, "npu": npu}
