"""Which ranks hear of which others: those of several hosts by connections, replicas of a dense model by datagrams."""

from __future__ import annotations

import logging.handlers
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.utils.network_utils import get_ip, get_open_port

from npu_platform import compat
from npu_platform.distributed import beats
from npu_platform.distributed.stop_watch import here

ALONE: Any = SimpleNamespace(rank_in_group=0, world_size=1)


def replica(number: int, *, beside_server: bool, address: str, **changes: Any) -> Any:
    """What a replica of a dense model finds of its layout."""
    found = {"data_parallel_index": number, "data_parallel_size": 1, "local_engines_only": False}
    found |= {"data_parallel_master_ip": address, "data_parallel_rpc_port": get_open_port(), "use_ray": False}
    found |= {"distributed_executor_backend": "uni", "_coord_store_port": 7 if beside_server else 0}
    return SimpleNamespace(**found | changes)


@pytest.fixture
def address() -> str:
    """One of this host that is not for itself alone."""
    found = get_ip()
    if found.startswith("127.") or found in ("::1", "0.0.0.0"):
        pytest.skip("this host has no address for others")
    return found


def sockets_of(parallel: Any, group: Any = ALONE) -> list[socket.socket]:
    return beats.sockets(group, parallel, [here(parallel.data_parallel_index)])


def test_the_first_replica_and_those_on_other_hosts_hear_of_each_other(address: str) -> None:
    (home,) = sockets_of(replica(0, beside_server=True, address=address))
    port = home.getsockname()[1]
    (end,) = sockets_of(replica(1, beside_server=False, address=address, data_parallel_rpc_port=port))
    with home, end:
        assert end.getpeername()[:2] == (address, port)
        end.send(b".")
        assert home.recv(8) == b"."
        with socket.create_server((address, port)):
            pass  # as vLLM's own, whose number it has


@pytest.mark.parametrize(
    "parallel",
    [
        replica(0, beside_server=False, address="10.1.2.3"),  # an engine without others
        replica(1, beside_server=True, address="10.1.2.3"),  # vLLM looks after it
        replica(0, beside_server=True, address="127.0.0.1"),  # all are on this host
        replica(0, beside_server=True, address="10.1.2.3", local_engines_only=True),  # a server with its own
        replica(1, beside_server=False, address="10.1.2.3", data_parallel_size=2),  # of experts: it has a group
    ],
)
def test_others_need_none(parallel: Any) -> None:
    assert sockets_of(parallel) == []


def test_other_ranks_of_a_replica_need_none(address: str) -> None:
    second: Any = SimpleNamespace(rank_in_group=1, world_size=2)
    assert sockets_of(replica(0, beside_server=True, address=address), second) == []


def test_a_replica_that_cannot_listen_says_so() -> None:
    """As where the server's address is not its host's own, but one that leads there."""
    told = logging.handlers.BufferingHandler(10)
    beats.logger.addHandler(told)
    try:
        assert sockets_of(replica(0, beside_server=True, address="192.0.2.1")) == []
    finally:
        beats.logger.removeHandler(told)
    (record,) = told.buffer
    assert "do not hear each other" in record.getMessage()


def test_vllm_says_who_is_started_beside_its_server() -> None:
    parallel = ParallelConfig()
    assert compat.is_started_beside_its_server(parallel) is False
    parallel._coord_store_port = 29501
    assert compat.is_started_beside_its_server(parallel) is True
