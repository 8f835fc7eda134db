"""The host tier's memory: one region of /dev/shm for all processes of an engine, taken at the start and never grown.

Workers copy blocks of the device to and from it, and the scheduler's process moves chunks between it and the tiers
behind it. A row of the region is a chunk; within a row each worker has its place, or all share one.

Note [Taken at start]. Memory of the host is promised before it is there: a check alone would pass in each of several
engines, and the kernel would kill one of them hours later, when its pages are first stored to. So processes take turns,
and the first of an engine writes to all of the region before the next engine looks at what is left.

Note [No name left behind]. A file in /dev/shm outlives a process that is killed. So the name goes as soon as all have
the region: vLLM makes the scheduler after every worker has registered its caches, and the scheduler removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from npu_kvconnector.errors import CapacityError, UnsupportedError
from npu_kvconnector.tiers.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LOCK", "HostRegion"]

LOCK = Path(tempfile.gettempdir()) / f"npu-kvconnector-{os.getuid()}" / "lock"
"""Held by a process of this user while it takes its memory; in a folder that nobody else can write to."""

logger = init_logger("vllm.npu_kvconnector")

_PATIENCE = 5.0  # seconds, after which a process says what it waits for


class HostRegion(SharedOffloadRegion):
    """vLLM's shared region, taken in turns and within what the host and its control groups have."""

    def __init__(
        self, engine_id: str, *, num_chunks: int, rank: int | None, kv_bytes_per_chunk: int, cpu_page_size: int
    ) -> None:
        """Create the region, or open the one that another process of this engine has created.

        Args:
            engine_id: names the engine, also among its restarts.
            num_chunks: rows.
            rank: whose place in a row the views are of; None in the scheduler.
            kv_bytes_per_chunk: bytes of a row, whole pages of memory.
            cpu_page_size: bytes of one worker's place in a row.

        Raises:
            CapacityError: /dev/shm, the host or a control group has less left, or processes cannot take turns.
            UnsupportedError: another process of this engine has made it of another size.
        """
        size = num_chunks * kv_bytes_per_chunk
        with _turn():
            try:
                super().__init__(
                    engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size, creator_memory_check=_check_memory
                )
            except (RuntimeError, TimeoutError) as error:
                kind = UnsupportedError if isinstance(error, TimeoutError) else CapacityError
                msg = f"the host tier of {size} bytes cannot be had: {error}; lower cpu_bytes_to_use"
                raise kind(msg) from error
            if self.is_creator:
                self.base_tensor[:: mmap.PAGESIZE].zero_()  # see Note [Taken at start]
        if os.fstat(self.fd).st_size != size:
            self.cleanup()
            msg = "the ranks' KV caches differ in size, as of pipeline stages with unlike layers; use equal stages"
            raise UnsupportedError(msg)

    def forget_name(self) -> None:
        """Remove the file's name; see Note [No name left behind]."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.mmap_path).unlink()

    @property
    def is_creator(self) -> bool:
        """Whether this process made the region, so that others may still come for it."""
        return bool(self._creator)

    def cleanup(self) -> None:
        """Give the memory back; safe to call twice."""
        self._creator: bool = self.is_creator and Path(self.mmap_path).exists()
        super().cleanup()


def _check_memory(size: int) -> None:
    available = available_bytes()
    if size > available:
        msg = f"{available} bytes are available on this host and in its control groups"
        raise RuntimeError(msg)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Wait for the other processes that are taking memory; see Note [Taken at start]."""
    descriptor = _open_lock()
    try:
        _wait_for(descriptor)
        yield
    finally:
        os.close(descriptor)


def _open_lock() -> int:
    """Return a descriptor of the lock.

    Raises:
        CapacityError: it cannot be had, since another user has made a folder of its name.
    """
    try:
        LOCK.parent.mkdir(mode=0o700, exist_ok=True)
        about = LOCK.parent.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            raise PermissionError(errno.EACCES, "it is another user's")
        return os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        hint = "set TMPDIR to a folder of your own"
        msg = f"processes that take memory wait at {LOCK}, which cannot be used: {error.strerror}; {hint}"
        raise CapacityError(msg) from error


def _wait_for(lock: int) -> None:
    """Take the lock; say so where that takes long."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return
    logger.warning("Another process of this user takes its host memory: waiting for it (`fuser %s` names it)", LOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)
