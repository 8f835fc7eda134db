"""A process that is stopped is ended; one that goes on in time is not, and the watch ends with the first of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from npu_platform.distributed.stop_watch import (
    SILENCES,
    Place,
    StopWatch,
    first_on_each_host,
    here,
    on_my_host,
    starter_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 2
Processes = list[subprocess.Popen[bytes]]


@contextlib.contextmanager
def engine() -> Iterator[Processes]:
    """Run two processes, as an engine and its rank."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def pair() -> Iterator[Processes]:
    with engine() as processes:
        yield processes


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_process_is_ended_and_the_other_is_not(which: int, pair: Processes) -> None:
    watch = StopWatch([process.pid for process in pair], SECONDS)
    os.kill(pair[which].pid, signal.SIGSTOP)
    assert pair[which].wait(30) == -signal.SIGKILL
    assert pair[1 - which].poll() is None
    pair[0].kill()
    assert watch.has_ended(30)
    watch.close()


def test_a_process_that_goes_on_in_time_is_left_alone(pair: Processes) -> None:
    watch = StopWatch([process.pid for process in pair], 3 * SECONDS)
    os.kill(pair[1].pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pair[1].pid, signal.SIGCONT)
    time.sleep(1)
    assert [process.poll() for process in pair] == [None] * 2
    assert not watch.has_ended()
    ended = os.pidfd_open(watch.process)
    watch.close()
    assert select.select([ended], (), (), 0)[0]
    os.close(ended)


def two_hosts(one: Processes, other: Processes, seconds: int = 1) -> list[StopWatch]:
    """Start the watches of two hosts, which hear of each other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    return [
        StopWatch([process.pid for process in processes], seconds, hosts=[connection])
        for processes, connection in zip((one, other), connections, strict=True)
    ]


def test_the_ranks_beside_a_watch_end_when_the_other_host_is_silent(
    pair: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its watch stands still with all else there: the system still holds the connection, and nothing comes."""
    with engine() as elsewhere:
        one, other = two_hosts(pair, elsewhere)
        assert not one.has_ended(2 * SILENCES), "each hears the other"
        assert [process.poll() for process in pair] == [None] * 2
        os.kill(other.process, signal.SIGSTOP)
        assert pair[1].wait(30) == -signal.SIGKILL
        assert pair[0].poll() is None, "the engine sees that its rank has died, and ends by itself"
        assert pair[0].wait(30) == -signal.SIGKILL, "or it waits for the engine of the other host"
        os.kill(other.process, signal.SIGCONT)
        for watch in (one, other):
            watch.close()
    said = capfd.readouterr().err
    assert f"npu: host 127.0.0.1 says nothing for {SILENCES} s" in said
    assert f"npu: the engine {pair[0].pid} has not ended 1 s after its ranks: it is killed" in said


def test_a_host_that_has_ended_is_left_to_others_at_first(pair: Processes, capfd: pytest.CaptureFixture[str]) -> None:
    with engine() as elsewhere:
        one, other = two_hosts(pair, elsewhere)
        assert not one.has_ended(2), "each hears the other"
        other.close()
        began = time.monotonic()
        assert pair[1].wait(30) == -signal.SIGKILL
        assert time.monotonic() - began > SILENCES - 1
        one.close()
    assert f"npu: host 127.0.0.1 ended {SILENCES} s ago" in capfd.readouterr().err


def test_a_host_that_has_no_watch_ends_nobody(pair: Processes) -> None:
    """As one that is started with other settings."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    watch = StopWatch([process.pid for process in pair], 1, hosts=[connection])
    assert not watch.has_ended(SILENCES + 2)
    assert [process.poll() for process in pair] == [None] * 2
    watch.close()


def datagrams(seconds: int, here: Processes, *elsewhere: Processes) -> list[StopWatch]:
    """Start the watches of replicas: that of the server's host, and others."""
    home = socket.socket(type=socket.SOCK_DGRAM)
    home.bind(("127.0.0.1", 0))
    ends = [home]
    for _ in elsewhere:
        ends.append(socket.socket(type=socket.SOCK_DGRAM))
        ends[-1].connect(home.getsockname())
    return [
        StopWatch([process.pid for process in processes], seconds, hosts=[end], ranks_from=0)
        for processes, end in zip((here, *elsewhere), ends, strict=True)
    ]


@pytest.mark.nightly  # by day ranks end when a host is silent
def test_a_replica_ends_when_one_elsewhere_is_silent(pair: Processes, capfd: pytest.CaptureFixture[str]) -> None:
    with engine() as other, engine() as third:
        watches = datagrams(1, pair, other, third)
        assert not watches[0].has_ended(SILENCES + 2), "each hears the others"
        assert all(process.poll() is None for process in (*pair, *other, *third))
        os.kill(watches[1].process, signal.SIGSTOP)
        assert [process.wait(30) for process in pair] == [-signal.SIGKILL] * 2
        assert [process.wait(30) for process in third] == [-signal.SIGKILL] * 2, "its server is gone"
        os.kill(watches[1].process, signal.SIGCONT)
        assert [process.wait(30) for process in other] == [-signal.SIGKILL] * 2
        for watch in watches:
            assert watch.has_ended(30)
            watch.close()
    said = capfd.readouterr().err
    assert f"npu: the replica at 127.0.0.1 says nothing for {SILENCES} s: the ranks here" in said
    assert "npu: the replica at 127.0.0.1 has ended: the ranks here" in said


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_replica_that_ends_says_so(how: str, pair: Processes) -> None:
    """At once: it would be silent after half a minute here."""
    with engine() as other:
        watches = datagrams(10, pair, other)
        assert not watches[0].has_ended(SILENCES)
        if how == "killed":
            other[0].kill()
        else:
            watches[1].close()
        assert [process.wait(5) for process in pair] == [-signal.SIGKILL] * 2
        assert watches[0].has_ended(5)


@pytest.mark.nightly
def test_a_server_that_nobody_speaks_to_goes_on(pair: Processes) -> None:
    """And one to which a replica speaks that an earlier server has left: that one ends."""
    (watch,) = datagrams(1, pair)
    assert not watch.has_ended(SILENCES + 1)
    watch.close()
    with engine() as left, socket.socket(type=socket.SOCK_DGRAM) as earlier:
        earlier.bind(("127.0.0.1", 0))
        with socket.socket(type=socket.SOCK_DGRAM) as end:
            end.connect(earlier.getsockname())
            old = StopWatch([process.pid for process in left], 10, hosts=[end], ranks_from=0)
        _, there = earlier.recvfrom(64)
        earlier.sendto(b"." + bytes(8), there)
        while (said := earlier.recv(64)) == b".":
            pass
        assert said == b"." + bytes(8), "it has learnt the token"
        new = StopWatch([process.pid for process in pair], 1, hosts=[earlier], ranks_from=0)
        assert [process.wait(10) for process in left] == [-signal.SIGKILL] * 2
        assert old.has_ended(5)
        assert not new.has_ended(SILENCES + 1)
        assert [process.poll() for process in pair] == [None] * 2
        new.close()


def test_the_watch_is_not_among_the_children_that_a_server_kills() -> None:
    watch = StopWatch([os.getpid()], SECONDS)
    assert psutil.Process(watch.process).is_running()
    assert watch.process not in {child.pid for child in psutil.Process().children(recursive=True)}
    watch.close()


# A program that starts an engine by vLLM's name, which ends when asked to, or does not.
PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
if os.fork():
    time.sleep(60)
ctypes.CDLL(None).prctl(15, b"VLLM::EngineCore_DP0")
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("engine", [pytest.param("polite", marks=pytest.mark.nightly), "deaf"])
def test_an_engine_whose_program_was_killed_is_ended(engine: str) -> None:
    command = [sys.executable, "-S", "-c", PROGRAM, engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        process = int(program.stdout.readline())
        assert starter_of(process) == program.pid
        assert starter_of(program.pid) == 0, "who started a program is not to be waited for"
        watch = StopWatch([process], SECONDS, program.pid)
        assert not watch.has_ended(2 * SECONDS)
        ended = os.pidfd_open(process)
        program.kill()
        program.wait()
        assert select.select([ended], (), (), 30)[0]
        os.close(ended)
        assert watch.has_ended(30)
        watch.close()


def test_processes_of_other_hosts_and_replicas_are_not_watched() -> None:
    mine = here(1)
    others = [mine._replace(**{name: "other"}, process=7) for name in ("host", "processes")]
    assert mine == Place(mine.host, mine.processes, 1, os.getpid())
    of_all = [*others, here(0), mine, mine._replace(process=3)]
    assert on_my_host(mine, of_all) == [os.getpid(), 3]
    assert first_on_each_host(of_all) == [0, 1, 2]
