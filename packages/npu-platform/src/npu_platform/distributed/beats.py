"""What the watches of an engine's hosts and replicas hear of each other by: connections, or else datagrams."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

from npu_platform import compat
from npu_platform.distributed import host_watch, stop_watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger("vllm.npu_platform.distributed.beats")


def sockets(
    group: GroupCoordinator, parallel: ParallelConfig, of_all: Sequence[stop_watch.Place]
) -> list[socket.socket]:
    """Return those of this rank, of ranks in these places; all ranks of the group call this.

    Ranks of several hosts that share a group, be it of replicas, have connections to the host of rank 0. Without them,
    which is said in the log, a host that stands still is noticed by what waits for it, if at all.
    """
    found: list[socket.socket] = []
    firsts = stop_watch.first_on_each_host(of_all)
    try:
        if len(firsts) > 1 and parallel.distributed_executor_backend != "external_launcher":
            found += host_watch.connect(group, firsts, address_of_this_host(parallel))
        if group.rank_in_group == 0:
            found += _datagrams(parallel)
    except OSError as error:
        logger.warning("hosts of this engine, or its replicas, do not hear each other: %s", error)
    return found


def address_of_this_host(parallel: ParallelConfig) -> str:
    """Return that by which other hosts of the engine reach it."""
    if parallel.use_ray:
        from vllm.v1.executor import ray_utils

        return str(ray_utils.ray.util.get_node_ip_address())
    return get_ip()


def _datagrams(parallel: ParallelConfig) -> list[socket.socket]:
    """Return the socket by which replicas of a dense model hear of each other, where this one needs it.

    These are the first replica, on the server's host, and those that ``vllm serve --headless`` starts on others. They
    share no group, but they know the address and the port by which vLLM starts them; datagrams have the same port
    without being in the way. Servers with replicas of their own do not depend on those of others.
    """
    replica, beside_server = parallel.data_parallel_index, compat.is_started_beside_its_server(parallel)
    apart = parallel.data_parallel_size == 1 and not parallel.local_engines_only
    if not apart or beside_server is not (replica == 0):
        return []
    where = (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
    family, _, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
    if ipaddress.ip_address(address[0]).is_loopback:  # the others are here, and vLLM looks after them
        return []
    own = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if beside_server:
            own.bind(address)
        else:
            own.connect(address)
    except OSError:
        own.close()
        raise
    return [own]
