"""HostWatch: the hosts of an engine notice when one of them is gone.

vLLM's multiprocessing executor watches the processes of its own host. The rank that answers for a step is on the last
host, so without this the first one waits for ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`` when that host dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger("vllm.npu_platform.distributed.host_watch")

CONNECT_SECONDS = 60.0
# A host without power says nothing: after 5 s of silence it is asked every 5 s, and given up after 3 questions.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
GRACE = 5.0  # seconds for an orderly end


def join(
    group: GroupCoordinator, firsts: Sequence[int], mine: str, when_gone: Callable[[str], None]
) -> HostWatch | None:
    """Connect the first rank of each host with rank 0; all ranks of the group call this. Others than those get None.

    `when_gone` is called once, in a thread, with the name of the host. The rest is as in :func:`connect`.
    """
    connections = connect(group, firsts, mine)
    return HostWatch(connections, when_gone) if connections else None


def connect(group: GroupCoordinator, firsts: Sequence[int], mine: str) -> list[socket.socket]:
    """Return connections of the first rank of each host with rank 0, which is one; all ranks of the group call this.

    Others than those have none. `mine`: an address of this host that others reach. Raises OSError where a host cannot
    reach the first one within a minute.
    """
    listener = None
    if group.rank_in_group == 0:
        with contextlib.suppress(OSError):
            listener = _listener(mine, len(firsts))
    address = group.broadcast_object(listener and listener.getsockname()[:2], src=0)
    if address is None:
        msg = "the first host of this engine cannot listen at the address that vLLM takes for its own: see VLLM_HOST_IP"
        raise OSError(msg)
    if group.rank_in_group not in firsts:
        return []
    if listener is None:
        return [socket.create_connection(address, CONNECT_SECONDS)]
    with listener:
        listener.settimeout(CONNECT_SECONDS)
        return [listener.accept()[0] for _ in firsts[1:]]


def end_this_process(host: str) -> None:
    """End a worker because a host is gone: vLLM's executor sees that, tells all clients, and ends the others."""
    logger.error("host %s of this engine is gone or has ended: this rank ends, and with it the engine", host)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)  # the main thread waits in a collective for the host that is gone


def end_this_process_if_it_stays(host: str) -> None:
    """End a worker so that Ray does not: at the end of an engine it kills all, one soon after the other."""
    time.sleep(GRACE)
    end_this_process(host)


class HostWatch:
    """Connections to other hosts, over which nothing is sent: they end with the processes that hold them."""

    def __init__(self, connections: list[socket.socket], when_gone: Callable[[str], None]) -> None:
        self._connections = connections
        self._when_gone = when_gone
        self._over = threading.Lock()  # held from the first host that is gone, or from `close`
        for connection in connections:
            host = connection.getpeername()[0]
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            name = f"npu-host-watch-{host}"
            threading.Thread(target=self._wait, args=(connection, host), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop watching, before this host ends of its own accord."""
        self._over.acquire(blocking=False)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended before
                connection.shutdown(socket.SHUT_RDWR)  # which a close would not do while the thread reads
            connection.close()

    def _wait(self, connection: socket.socket, host: str) -> None:
        """Return from a read that has no other end than that of the connection."""
        try:
            connection.recv(1)
        except OSError as error:
            logger.debug("the connection to host %s: %s", host, error)
        if self._over.acquire(blocking=False):
            self._when_gone(host)


def _listener(address: str, hosts: int) -> socket.socket:
    family = socket.AF_INET6 if is_valid_ipv6_address(address) else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=hosts)
