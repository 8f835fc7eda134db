"""Owns vLLM's sleep mode on npu: which memory sleeps at which level, and wakes for which tags.

What vLLM allocates under a tag lies in a pool of the device; while it sleeps, the device (and the system, where the
device's memory is the host's) has the memory back, and addresses stay, so that captured graphs go on afterwards.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_platform.torch_npu.memory import MemPool
    from npu_platform.torch_npu.sleeping_pools import SuspendedPool

__all__ = ["BACKEND", "NPUSleepMode", "register"]

BACKEND = "npu"
"""The name under which vLLM's factory has the backend."""

GRAPHS = "cudagraph"
"""vLLM's tag of the memory of graphs."""

_ALWAYS_KEPT = ("runtime", GRAPHS)  # what is made once, and read for as long as the engine lives

logger = init_logger("vllm.npu_platform.sleep_mode")


@cache
def register() -> None:
    """Register the backend with vLLM, once in a process."""
    SleepModeBackendFactory.register_backend(BACKEND, __name__, NPUSleepMode.__name__)


class NPUSleepMode(SleepModeBackend):
    """The memory of one worker by vLLM's tags: weights, kv_cache, runtime, cudagraph."""

    def __init__(self) -> None:
        """Begin with nothing; vLLM's factory gives no arguments."""
        super().__init__()
        self.folder: Path | None = None
        """Where what is kept lies while it sleeps; None: in the host's memory."""
        self._pools: defaultdict[str, MemPool] = defaultdict(torch.npu.MemPool)
        self._handles: dict[str, tuple[int, int]] = {}
        self._asleep: dict[str, SuspendedPool] = {}

    @contextlib.contextmanager
    def memory_of(self, tag: str) -> Iterator[None]:
        """Allocate this thread's tensors under `tag` inside the context."""
        pool = self._pools[tag]
        self._handles[tag] = pool.id
        with torch.npu.use_mem_pool(pool):
            yield
        pool.empty_cache()

    def add_graphs(self, handle: tuple[int, int]) -> None:
        """Let the memory of the graphs' pool sleep as well."""
        self._handles[GRAPHS] = handle

    def sleeps(self, tag: str) -> bool:
        """Say whether nothing may use the memory of `tag`."""
        return tag in self._asleep

    def suspend(self, level: int = 1) -> None:
        """Give all tagged memory back; level 1 keeps the weights for :meth:`resume`, level 2 does not."""
        kept = _ALWAYS_KEPT if level > 1 else ("weights", *_ALWAYS_KEPT)
        self._sleep(tuple(self._handles), kept)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give the memory of `tags` back without its contents."""
        self._sleep(tags, ())

    def resume(self, tags: list[str] | None = None) -> None:
        """Take the memory of `tags` again, and of all that vLLM does not let sleep on; None: of everything.

        Raises torch.OutOfMemoryError where the device has too little; what is not awake sleeps on then.
        """
        self._state = "RESUMING"
        try:
            for tag in tuple(self._asleep):
                if tags is None or tag in tags or tag not in DEFERRABLE_TAGS:
                    self._asleep[tag].resume()
                    del self._asleep[tag]
        finally:
            self._state = "SUSPENDED" if self._asleep else "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        """Ask the device's driver."""
        return torch.npu.can_suspend_pools()

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Say True: process groups do not sleep."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Say True: compiled code is the host's."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Say True: addresses stay."""
        return True

    def _sleep(self, tags: tuple[str, ...], kept: tuple[str, ...]) -> None:
        given = copied = 0
        for tag in tags:
            if tag not in self._handles or tag in self._asleep:
                continue
            asleep = torch.npu.suspend_pool(self._handles[tag], keep=tag in kept, folder=self.folder)
            self._asleep[tag] = asleep
            self._state = "SUSPENDED"
            given, copied = given + asleep.bytes, copied + asleep.kept
        torch.accelerator.empty_cache()
        where = "the host's memory" if self.folder is None else str(self.folder)
        logger.info("npu sleep mode gave back %s GiB; %s GiB wait in %s.", format_gib(given), format_gib(copied), where)
