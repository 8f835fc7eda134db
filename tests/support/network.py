"""A second host on this one: a network namespace with a cable to it, for processes that then share no memory with others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Network", "second_network"]

_PREFIX = "npu"
_NEW_HOST_NAME, _NEW_NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS, CLONE_NEWNET


@dataclass(frozen=True)
class Network:
    """A cable to a namespace: its ends have an address and a device each."""

    name: str
    here: str
    there: str

    def cut(self) -> None:
        """Let nothing through any more, as where a host has no power."""
        subprocess.run(["ip", "link", "set", f"{self.name}a", "down"], check=True)

    def environ(self, *, second: bool) -> dict[str, str]:
        """Return what tells vLLM and gloo the address and the device of one end."""
        address, end = (self.there, "b") if second else (self.here, "a")
        return {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": f"{self.name}{end}"}

    def on_second_host(self, command: list[str]) -> list[str]:
        """Return what runs a command there, whose processes are of its own, too: this host's do not see them."""
        apart = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        return ["ip", "netns", "exec", self.name, *apart, "sh", "-c", 'hostname second && exec "$@"', "sh", *command]

    def enter(self) -> None:
        """Move this process, which has one thread, to the second host."""
        system = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open("rb") as namespace:
            if system.setns(namespace.fileno(), _NEW_NETWORK) or system.unshare(_NEW_HOST_NAME):
                raise OSError(ctypes.get_errno(), f"this process cannot enter {self.name}")
        socket.sethostname("second")
        os.environ |= self.environ(second=True)


@contextlib.contextmanager
def second_network() -> Iterator[Network]:
    """Make a network namespace. Raises PermissionError where that takes rights, or a program, that this user has not."""
    _remove_those_of_killed_processes()
    made = Network(f"{_PREFIX}{os.getpid()}", *_addresses_of(os.getpid()))
    name, mask = made.name, "/30"
    steps = (
        f"link add {name}a type veth peer name {name}b netns {name}",
        f"addr add {made.here}{mask} dev {name}a",
        f"link set {name}a up",
        f"-n {name} addr add {made.there}{mask} dev {name}b",
        f"-n {name} link set {name}b up",
        f"-n {name} link set lo up",
    )
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        msg = "network namespaces need the program ip, and CAP_SYS_ADMIN"
        raise PermissionError(msg)
    try:
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True)
        yield made
    finally:
        _remove(name)


def _addresses_of(process: int) -> tuple[str, str]:
    """Return both ends in a network of four that is this process's: two cables with one route would lose packets."""
    network = (process % 2**14) * 4
    base = f"10.254.{network >> 8}"
    return f"{base}.{(network & 255) + 1}", f"{base}.{(network & 255) + 2}"


def _remove_those_of_killed_processes() -> None:
    for namespace in Path("/run/netns").glob(f"{_PREFIX}*"):
        process = namespace.name.removeprefix(_PREFIX)
        if process.isdigit() and not Path("/proc", process).exists():
            _remove(namespace.name)


def _remove(name: str) -> None:
    # The cable first: with its namespace it would go some time later.
    subprocess.run(["ip", "link", "del", f"{name}a"], check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
