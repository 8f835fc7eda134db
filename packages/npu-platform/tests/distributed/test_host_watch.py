"""A watch over another host: it calls once when the connection ends, and not after it was closed itself."""

from __future__ import annotations

import queue
import socket

import pytest

from npu_platform.distributed.host_watch import HostWatch


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
