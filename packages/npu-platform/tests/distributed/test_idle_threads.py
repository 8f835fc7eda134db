"""Threads of process groups that wait for nothing are left asleep; what they wait for still wakes them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest

from npu_platform.distributed import idle_threads

GET = 30  # PR_GET_TIMERSLACK
SECOND_OF_A_GROUP = """
import contextlib, sys, time
from pathlib import Path
import torch.distributed as dist
from npu_platform.distributed import idle_threads

def of_gloo(task):
    with contextlib.suppress(OSError):  # others' threads end meanwhile
        return "gloo_tcp" in (task / "comm").read_text()

def looks():
    threads = []
    while not threads:  # each gives itself its name
        threads = [task for task in Path("/proc/self/task").iterdir() if of_gloo(task)]
    return sum(int((task / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0]) for task in threads)

seldom = sys.argv[1] == "seldom"
with idle_threads.seldom_awake() if seldom else contextlib.nullcontext():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = looks()
time.sleep(1)
print(looks() - before)
dist.destroy_process_group()
"""


def slack() -> int:
    """The calling thread's, in nanoseconds."""
    return int(ctypes.CDLL(None).prctl(GET, 0, 0, 0, 0))


def slack_of_a_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(slack()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_inherit_it_and_the_caller_does_not_keep_it() -> None:
    before = slack()
    assert before < idle_threads.SLACK
    with idle_threads.seldom_awake():
        assert slack_of_a_thread() == idle_threads.SLACK
    assert slack() == before
    assert slack_of_a_thread() == before


def test_it_ends_with_an_error() -> None:
    before, msg = slack(), "no group"
    with pytest.raises(RuntimeError, match=msg), idle_threads.seldom_awake():
        raise RuntimeError(msg)
    assert slack() == before


def looks_in_a_second(how: str) -> int:
    command = [sys.executable, "-c", SECOND_OF_A_GROUP, how]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout)


@pytest.mark.nightly
def test_a_group_of_gloo_looks_up_seldom() -> None:
    # By itself: 100. On a busy machine both are fewer.
    assert looks_in_a_second("seldom") < looks_in_a_second("as ever") / 2
