"""The host tier: one worker's host memory for KV pages, allocated once and never grown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
import torch

from npu_kvconnector.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["allocate_pages"]


def allocate_pages(
    page_sizes: Sequence[int], *, num_pages: int, budget: int, pin_memory: bool = False
) -> list[torch.Tensor]:
    """Return a host tensor [num_pages, page_size] of int8 for each page size in bytes.

    Memory that is not pinned is reserved here and taken from the host as pages are first stored.

    Raises:
        CapacityError: more than ``budget`` bytes would be needed, or the host has less available.
    """
    needed = num_pages * sum(page_sizes)
    available = psutil.virtual_memory().available
    if needed > budget:
        msg = f"the host tier would take {needed} bytes, more than this worker's share of {budget} bytes"
        raise CapacityError(msg)
    if needed > available:
        msg = f"the host tier takes {needed} bytes, {available} are available on this host; lower cpu_bytes_to_use"
        raise CapacityError(msg)
    return [torch.empty((num_pages, size), dtype=torch.int8, pin_memory=pin_memory) for size in page_sizes]
