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

from npu_platform.distributed.stop_watch import SILENCES, Place, StopWatch, here, on_my_host, starter_of

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
        os.kill(other.process, signal.SIGCONT)
        for watch in (one, other):
            watch.close()
    assert f"npu: host 127.0.0.1 says nothing for {SILENCES} s" in capfd.readouterr().err


def test_a_watch_that_has_ended_is_not_one_that_stands_still(pair: Processes) -> None:
    """As where an engine ends, or where one host is started with other settings."""
    with engine() as elsewhere:
        one, other = two_hosts(pair, elsewhere)
        other.close()
        assert not one.has_ended(SILENCES + 2)
        assert [process.poll() for process in pair] == [None] * 2
        one.close()


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


@pytest.mark.parametrize("engine", ["polite", "deaf"])
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
    assert on_my_host(mine, [*others, here(0), mine, mine._replace(process=3)]) == [os.getpid(), 3]
