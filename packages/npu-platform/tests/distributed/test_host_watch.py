"""A watch over another host: it calls once when the connection ends, and not after it was closed itself."""

from __future__ import annotations

import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from npu_platform.distributed.host_watch import HostWatch, connect


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        return listener.accept()[0], there


def test_the_first_host_that_is_gone_is_told_once() -> None:
    (here, there), (here_too, there_too) = connected(), connected()
    gone: queue.Queue[str] = queue.Queue()
    HostWatch([here, here_too], gone.put)
    assert gone.empty()
    there.close()
    assert gone.get(timeout=10) == "127.0.0.1"
    there_too.close()
    with pytest.raises(queue.Empty):
        gone.get(timeout=0.2)


def test_a_host_that_ends_itself_hears_nothing_and_is_heard() -> None:
    here, there = connected()
    gone_for_it, gone_for_them = queue.Queue[str](), queue.Queue[str]()
    watch, _ = HostWatch([here], gone_for_it.put), HostWatch([there], gone_for_them.put)
    watch.close()
    assert gone_for_them.get(timeout=10) == "127.0.0.1"
    with pytest.raises(queue.Empty):
        gone_for_it.get(timeout=0.2)


class Ranks:
    """Groups of ranks in threads, which hand on what rank 0 broadcasts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._said: list[queue.Queue[Any]] = [queue.Queue() for _ in range(count)]

    def connect(self, firsts: list[int], address: str) -> list[list[socket.socket] | OSError]:
        """Let all ranks call `connect`, and return what each got."""

        def call(rank: int) -> list[socket.socket] | OSError:
            try:
                return connect(self._group(rank), firsts, address)
            except OSError as error:
                return error

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(call, range(self._count)))

    def _group(self, rank: int) -> Any:
        def broadcast_object(said: Any, src: int) -> Any:
            if rank == src:
                for other in self._said:
                    other.put(said)
            return self._said[rank].get(timeout=10)

        return SimpleNamespace(rank_in_group=rank, world_size=self._count, broadcast_object=broadcast_object)


def test_first_ranks_of_hosts_are_connected_with_the_first_of_all() -> None:
    zero, one, two, three = Ranks(4).connect([0, 2, 3], "127.0.0.1")
    assert one == []
    assert isinstance(zero, list)
    assert isinstance(two, list)
    assert isinstance(three, list)
    for (end,), word in ((two, b"2"), (three, b"3")):
        end.send(word)
        end.close()
    assert sorted(end.recv(1) for end in zero) == [b"2", b"3"]
    for end in zero:
        end.close()


def test_all_are_told_where_the_first_cannot_listen() -> None:
    """The others would wait for its address."""
    for got in Ranks(3).connect([0, 1], "192.0.2.1"):
        assert isinstance(got, OSError)
        assert "cannot listen" in str(got)
