"""Owns how vLLM makes its engine processes: forked, where that is safe, from one that has imported everything.

A spawned process imports it all once more, which is the longest part of a start.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from multiprocessing import resource_tracker

import torch

from npu_platform import config, openmp

__all__ = ["prepare"]


def prepare(*, bound: bool = False) -> None:
    """Make forks of this process safe, or let vLLM spawn its engine processes where they cannot be.

    `bound`: ranks are bound to memory nodes, for which vLLM starts a program.
    """
    if bound or (torch.npu.is_initialized() and not _devices_go_on()):
        config.use_spawned_workers()
    if config.forks_workers():
        # Otherwise the engine starts it, and dies with it by vLLM's stop, which leaves its ranks' queues in /dev/shm.
        resource_tracker.ensure_running()
    _register()


def _devices_go_on() -> bool:
    """Say whether devices that are up are there in a fork, without memory that nobody there would use."""
    holds_memory = any(map(torch.npu.memory_reserved, range(torch.npu.device_count())))
    return config.is_built_in(torch.npu.get_device_properties().driver) and not holds_memory


@functools.cache
def _register() -> None:
    os.register_at_fork(before=openmp.end_threads, after_in_child=_forget_the_parents)


def _forget_the_parents() -> None:
    """Keep the child's signals from the event loop of its parent, whose socket it has, but none of its threads."""
    openmp.sleep_after_loops.cache_clear()
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
