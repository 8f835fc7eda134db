"""The second host of tests: a run that was killed takes no address from the next one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.network import Network, second_network

_KILLED = """
import os, signal
from tests.support.network import second_network
with second_network() as network:
    print(network.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left() -> str:
    """Return the name of a network whose process was killed. Skips where this user may make none."""
    try:
        with second_network():
            pass
    except PermissionError as refused:
        pytest.skip(str(refused))
    killed = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return killed.stdout.strip()


def hear_from(network: Network) -> bytes:
    """Return what a process of the second host says to a port of this one."""
    with socket.create_server((network.here, 0)) as server:
        server.settimeout(20)
        say = (
            f"import socket; socket.create_connection(('{network.here}', {server.getsockname()[1]}), 10).send(b'here')"
        )
        said = subprocess.Popen(network.on_second_host([sys.executable, "-c", say]))
        connection, _ = server.accept()
        with connection:
            heard = connection.recv(16)
        assert said.wait(20) == 0
    return heard


def test_a_killed_run_leaves_nothing_to_the_next(left: str) -> None:
    assert Path("/run/netns", left).exists()
    with second_network() as network:
        assert not Path("/run/netns", left).exists()
        assert hear_from(network) == b"here"
    assert not Path("/run/netns", network.name).exists()
