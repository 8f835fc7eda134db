"""Owns the copies of recurrent states between blocks of the cache, by which vLLM caches prefixes of state models."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_platform import compat

__all__ = ["copy_pieces", "register_state_copies"]


def register_state_copies() -> None:
    """Give vLLM's kernel of these copies a body."""
    compat.register_kernels({"vllm.v1.worker.mamba_utils.batch_memcpy_kernel": copy_pieces})


def copy_pieces(src_ptrs: Tensor, dst_ptrs: Tensor, sizes: Tensor, BLOCK_SIZE: int) -> None:  # noqa: N803 - vLLM's name
    """Copy pieces of device memory, one after the other; a piece may overlap its target.

    src_ptrs, dst_ptrs: uint64 [n], addresses; sizes: int32 [n], bytes; all on the device.
    """
    from npu_platform import _C

    del BLOCK_SIZE
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        if abs(source - target) < size:
            via = torch.empty(size, dtype=torch.uint8, device=src_ptrs.device)
            _C.copy_memory(via.data_ptr(), source, size)
            _C.copy_memory(target, via.data_ptr(), size)
        else:
            _C.copy_memory(target, source, size)
