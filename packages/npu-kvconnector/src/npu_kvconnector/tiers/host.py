"""The host tier: one worker's host memory for KV pages, taken once and never grown.

Note [One region]. Pinned allocators round every tensor up to a power of two, which for a tensor a layer can come to
twice the bytes asked for. So all pages lie in one region, and it is pinned only where its rounded size is within the
budget as well, as with a budget that is a power of two.

Note [Taken at start]. Memory of the host is promised before it is there: a check alone would pass in each of several
workers, and the kernel would kill one of them hours later, when its pages are first stored to. So workers take turns,
and each writes to all of its memory before the next one looks at what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from npu_kvconnector.errors import CapacityError
from npu_kvconnector.tiers.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LOCK", "allocate_pages"]

LOCK = Path(tempfile.gettempdir()) / f"npu-kvconnector-{os.getuid()}.lock"
"""Held by a worker of this user while it takes its memory."""


def allocate_pages(
    page_sizes: Sequence[int], *, num_pages: int, budget: int, pin_memory: bool = False
) -> list[torch.Tensor]:
    """Return a host tensor [num_pages, page_size] of int8 for each page size in bytes; see Note [One region].

    ``pin_memory`` asks for pinned memory; whether it fitted the budget is for ``is_pinned()`` to say.

    Raises:
        CapacityError: more than ``budget`` bytes would be needed, or the host or a control group has less available.
    """
    needed = num_pages * sum(page_sizes)
    if needed > budget:
        msg = f"the host tier would take {needed} bytes, more than this worker's share of {budget} bytes"
        raise CapacityError(msg)
    rounded = 1 << max(needed - 1, 0).bit_length()
    pinned = pin_memory and rounded <= budget
    taken = rounded if pinned else needed
    with _turn():
        available = available_bytes()
        if taken > available:
            msg = (
                f"the host tier takes {taken} bytes, {available} are available on this host and in its control groups; "
                "lower cpu_bytes_to_use"
            )
            raise CapacityError(msg)
        region = torch.empty(needed, dtype=torch.int8, pin_memory=pinned).fill_(0)
    pages, start = [], 0
    for size in page_sizes:
        pages.append(region.narrow(0, start, num_pages * size).view(num_pages, size))
        start += num_pages * size
    return pages


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Wait for the other workers that are taking memory; see Note [Taken at start]."""
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
