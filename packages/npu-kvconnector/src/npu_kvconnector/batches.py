"""Copies of a whole job in one launch, where vLLM brings an operator for the device that takes addresses.

Such a device copies by itself between its memory and pinned host memory, and that only in pieces without gaps: a
strided copy of torch's would go through memory of its own and let the host wait, and with it the engine's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_kvconnector.pages import Pieces
    from npu_kvconnector.tiers.host import HostRegion

__all__ = ["BatchCopy", "find_batch_copy"]

logger = init_logger("vllm.npu_kvconnector")


class BatchCopy(Protocol):
    """Copies pieces on the current stream, which it does not wait for; returns their bytes."""

    def __call__(self, parts: Sequence[Pieces], *, to_host: bool) -> int:
        """Raise RuntimeError where the device refuses."""


def find_batch_copy(device: torch.device, region: HostRegion) -> BatchCopy | None:
    """Return what copies batches between ``device`` and ``region``, which is pinned then, or None.

    vLLM's ``swap_blocks_batch``: ``cuMemcpyBatchAsync`` on CUDA from 12.8 on, one call a piece before that and on ROCm.
    """
    if device.type != "cuda":
        return None
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        logger.warning("This vLLM has no operator swap_blocks_batch: the host tier is copied slowly, in steps")
        return None
    pin_mmap_region(region)  # cleanup() of the region unpins it

    def copy(parts: Sequence[Pieces], *, to_host: bool) -> int:
        if not any(len(part.sizes) for part in parts):
            return 0
        on_device, on_host, sizes = (torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))
        source, target = (on_device, on_host) if to_host else (on_host, on_device)
        # What a job loads is written to by nobody meanwhile, so the device may read it at once; what it stores may be
        # written to by steps before it.
        _custom_ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=not to_host)
        return int(sizes.sum())

    return copy
