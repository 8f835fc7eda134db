"""Owns the ledger of an engine's memory: what its ranks take of their devices and of the host."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import CacheConfig

__all__ = ["MemoryLedger", "available_memory", "cache_size_named", "host_memory", "tier_bytes"]

_GIB = 2.0**30


@dataclass(frozen=True)
class MemoryLedger:
    """The bytes of one rank's device, of the engine's host tier, and of the host that all of them may have to share."""

    weights: int
    cache: int
    device: int
    """All that the rank's device has given out, the weights and the KV cache among it."""
    tier: int
    """Of all ranks: what a KV connector keeps on the host."""
    ranks: int
    """On this host."""
    on_host: bool
    """Whether the device computes in memory of the host."""
    host: int

    @property
    def total(self) -> int:
        """Return what the engine takes of the host, without its processes' own memory."""
        return self.tier + (self.ranks * self.device if self.on_host else 0)

    def text(self) -> str:
        """Return the account in one line."""
        rest = self.device - self.weights - self.cache
        parts = {"weights": self.weights, "KV cache": self.cache, "rest of the device": rest, "host tier": self.tier}
        said = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        of_host = f"{self.ranks} ranks and the tier" if self.ranks > 1 else "all"
        return f"memory in GiB: {said}; of the host's {self.host / _GIB:.2f} {of_host} take {self.total / _GIB:.2f}"

    def problem(self) -> str | None:
        """Return what is wrong and the way out where the host cannot hold it all: memory is promised unseen."""
        if self.total <= self.host:
            return None
        return (
            f"The engine takes {self.total / _GIB:.2f} GiB of a host with {self.host / _GIB:.2f} GiB (control groups "
            "included): the system will end it when they are used. Lower --gpu-memory-utilization or "
            "--kv-cache-memory-bytes, or cpu_bytes_to_use of the KV connector."
        )


@contextlib.contextmanager
def cache_size_named(cache: CacheConfig) -> Iterator[None]:
    """Let the block's error of memory name the flag that says how large the KV cache is, where one does.

    Raises torch.OutOfMemoryError.
    """
    try:
        yield
    except RuntimeError as error:  # what an op of npu-ops finds no memory for is no torch.OutOfMemoryError
        flag = _flag_of_size(cache)
        if flag is None or "out of memory" not in str(error):
            raise
        msg = (
            f"{error}\nThe KV cache is as large as {flag} says: give less, so that steps and their graphs fit beside "
            "it and the weights, or leave the flag out, and what fits is measured."
        )
        raise torch.OutOfMemoryError(msg) from error


def _flag_of_size(cache: CacheConfig) -> str | None:
    if cache.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override={cache.num_gpu_blocks_override}"
    if cache.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory-bytes={cache.kv_cache_memory_bytes}"
    return None


def host_memory(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the host, or those that a control group around this process allows, if fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root, file = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):  # a container sees its own group as the root
                text = (folder / file).read_text().strip() if (folder / file).is_file() else "max"
                limits += [] if text == "max" else [int(text)]
    return min(limits)


def available_memory(account: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that the host can give out without swapping, and no more than :func:`host_memory`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", account.read_text(), re.MULTILINE)
    return min(int(found[1]) << 10 if found else 0, host_memory())


def tier_bytes(transfer: Any) -> int:
    """Return the bytes that a KV connector's configuration gives to the host's memory, 0 without one.

    transfer: vLLM's ``KVTransferConfig`` or None; ``cpu_bytes_to_use`` is the key of vLLM's offloading and of ours,
    a number or a size such as "4GiB". What is neither is the connector's to refuse.
    """
    given = transfer.kv_connector_extra_config.get("cpu_bytes_to_use", 0) if transfer is not None else 0
    size = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(I?)B?\s*", str(given).upper())
    if size is None:
        return 0
    return int(float(size[1]) * (1024 if size[3] else 1000) ** " KMGT".index(size[2] or " "))
