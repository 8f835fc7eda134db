"""How engine processes are made: forked by default, spawned where devices cannot go on, and as the user said."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_platform import config, forks
from tests.support.server import until
from tests.support.vllm_process import run_program

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ENGINE = """
import os, time
from multiprocessing.shared_memory import SharedMemory
from npu_platform import forks
from vllm.utils.system_utils import kill_process_tree

forks.prepare()
reader, writer = os.pipe()
if (engine := os.fork()) == 0:
    os.write(writer, SharedMemory(create=True, size=64).name.encode())
    time.sleep(600)
print(os.read(reader, 99).decode())
kill_process_tree(engine)
"""


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (METHOD, "_NPU_CHOSEN"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_forks_are_the_default(environ: pytest.MonkeyPatch) -> None:
    config.use_forked_workers()
    assert os.environ[METHOD] == "fork"
    gc.collect()
    torch.npu.empty_cache()
    forks.prepare()
    others_hold_memory = torch.npu.memory_reserved() > 0  # tests before this one, in the same process
    assert os.environ[METHOD] == ("spawn" if others_hold_memory else "fork")


def test_forks_that_were_chosen_for_a_program_are_no_choice_of_those_that_it_starts(
    environ: pytest.MonkeyPatch,
) -> None:
    config.use_forked_workers()
    config.begin_choice_of_runner()
    program = "import os; from npu_platform import config; config.use_spawned_workers(); print(os.environ['{METHOD}'])"
    command = [sys.executable, "-c", program.replace("{METHOD}", METHOD)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "spawn"
    environ.delenv("_NPU_CHOSEN")  # of a user who said so
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "fork"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_the_user_said_stays(environ: pytest.MonkeyPatch, method: str) -> None:
    environ.setenv(METHOD, method)
    held = torch.ones(1 << 20, device="npu")
    config.use_forked_workers()
    forks.prepare()
    assert (os.environ[METHOD], held.sum().item()) == (method, 1 << 20)


def test_memory_that_a_child_could_not_use_means_spawn(environ: pytest.MonkeyPatch) -> None:
    held = torch.ones(1 << 20, device="npu")
    config.use_forked_workers()
    forks.prepare()
    assert (os.environ[METHOD], held.sum().item()) == ("spawn", 1 << 20)


def test_memory_of_any_device_means_spawn() -> None:
    program = (
        "import os, torch; from npu_platform import config, forks; held = torch.ones(1 << 20, device='npu:1'); "
        f"config.use_forked_workers(); forks.prepare(); print(torch.npu.current_device(), os.environ['{METHOD}'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != METHOD} | {"NPU_SIMULATOR_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "spawn"], done.stderr


def test_ranks_that_are_bound_mean_spawn(environ: pytest.MonkeyPatch) -> None:
    config.use_forked_workers()
    forks.prepare(bound=True)
    assert os.environ[METHOD] == "spawn"


def test_a_vendors_devices_mean_spawn(environ: pytest.MonkeyPatch) -> None:
    environ.setattr(config, "_DRIVERS", ())
    torch.npu.init()
    config.use_forked_workers()
    forks.prepare()
    assert os.environ[METHOD] == "spawn"


def test_an_engine_that_is_killed_with_all_it_started_leaves_no_shared_memory() -> None:
    """So vLLM ends one of several ranks at each ordinary stop."""
    done = run_program(ENGINE, **{METHOD: "fork"})
    name = done.stdout.strip()
    assert name.startswith("psm_"), done.stderr
    assert until(lambda: not Path("/dev/shm", name).exists(), 5)


def test_signals_of_a_child_do_not_reach_its_parents_event_loop(environ: pytest.MonkeyPatch) -> None:
    forks.prepare()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        ours.close()
        theirs.close()
