"""What a server holds of the machine while it runs: memory, descriptors, shared memory and bytes of the device."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import torch

if TYPE_CHECKING:
    from npu_platform.demo.server import Server

__all__ = ["DeviceBytes", "Signs", "device_bytes", "shared_memory", "slope", "take"]


class DeviceBytes:
    """A part of the worker, by --worker-extension-cls, that tells what tensors hold of its device."""

    def device_bytes(self) -> int:
        """Return the bytes of this process's tensors on the current device."""
        return torch.npu.memory_allocated()


@dataclass(frozen=True)
class Signs:
    """At a time (seconds): resident bytes of all processes, shared ones in each, their open files, and threads."""

    time: float
    resident: int
    files: int
    threads: int


def take(server: Server) -> Signs:
    """Look at the server's processes."""
    resident = files = threads = 0
    for pid in server.processes_alive():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            resident += process.memory_info().rss
            files += process.num_fds()
            threads += process.num_threads()
    return Signs(time.monotonic(), resident, files, threads)


def slope(signs: list[Signs]) -> float:
    """Return the bytes a second by which a server grows: the median of the slopes between any two (Theil 1950, Sen 1968)."""
    found = sorted(
        (later.resident - one.resident) / (later.time - one.time)
        for place, one in enumerate(signs)
        for later in signs[place + 1 :]
    )
    return found[len(found) // 2] if found else 0.0


def device_bytes(server: Server) -> int:
    """Ask the worker, which has :class:`DeviceBytes`; the server is one of developers (``VLLM_SERVER_DEV_MODE=1``)."""
    answer = httpx.post(f"{server.url}/collective_rpc", json={"method": "device_bytes"}, timeout=60, trust_env=False)
    return sum(map(int, answer.raise_for_status().json()["results"]))


def shared_memory(server: Server, *others: int) -> set[Path]:
    """Return the pieces of shared memory with a name that the server's processes, and others, have mapped."""
    found = set()
    for pid in (*server.processes_alive(), *others):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in maps if " /dev/shm/" in line}
    return {path for path in found if path.exists()}  # those without one vanish with their processes
