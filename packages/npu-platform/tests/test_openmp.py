"""OpenMP's threads in processes of their own: a fork can use them, and they do not spin where nobody waits for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}

FORK = """
import os, signal, sys
import torch
from npu_platform import openmp
def loop():
    torch.set_num_threads(4)
    return (torch.ones(1 << 22) + 1).sum().item()
loop()
if "end" in sys.argv:
    os.register_at_fork(before=openmp.end_threads)
child = os.fork()
if child == 0:
    signal.alarm(4)
    os._exit(0 if loop() == 2 << 22 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loop() == 2 << 22)
"""

PAUSES = """
import sys, threading, time
import torch
from npu_platform import openmp
torch.set_num_threads(2)
x = torch.ones(1 << 17)
def pauses():
    x + 1
    begin = time.process_time()
    for _ in range(100):
        x + 1
        time.sleep(0.005)
    return time.process_time() - begin
before = pauses()
openmp.sleep_after_loops()
time.sleep(0.2)
print(before, pauses(), any(thread.name == "npu-openmp" for thread in threading.enumerate()))
"""

AGAIN = """
import os, threading
from npu_platform import config, forks, openmp
config.use_forked_workers()
forks.prepare()
openmp.sleep_after_loops()
child = os.fork()
openmp.sleep_after_loops()
is_there = any(thread.name == "npu-openmp" for thread in threading.enumerate())
if child == 0:
    os._exit(is_there)
print(is_there, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(program: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=ENVIRON | environ, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert run(FORK, "end") == "0 True"


@pytest.mark.nightly
def test_without_us_it_has_none() -> None:
    assert run(FORK) == "-14 True", "libgomp lives with forks by itself: end_threads() may go"


def test_a_fork_of_a_process_whose_threads_sleep_lets_its_own_sleep() -> None:
    """Such as a rank of an engine, in a program that had one inside before."""
    assert run(AGAIN) == "True 1"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has no second thread")
def test_threads_sleep_after_a_loop() -> None:
    spinning, sleeping, is_ours = run(PAUSES).split()
    assert float(sleeping) < float(spinning) / 2
    assert is_ours == "True"
    passive, _, is_ours = run(PAUSES, OMP_WAIT_POLICY="PASSIVE").split()
    assert float(sleeping) < 2 * float(passive) + 0.1
    assert is_ours == "False", "a policy of the user stays"
