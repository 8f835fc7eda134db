"""Copies of a whole job in one call, where there is an operator for the device that takes all of its pages at once.

CUDA copies by itself between its memory and pinned host memory, and that only in pieces without gaps: a strided copy of
torch's would go through memory of its own and let the host wait, and with it the engine's step. On npu and on the CPU
the host's threads copy, and the step waits for them: one call moves as much as there is time for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from npu_kvconnector.pages import Stack
    from npu_kvconnector.tiers.host import HostRegion
    from npu_kvconnector.transfer import Pairs

__all__ = ["BatchCopy", "find_batch_copy"]

logger = init_logger("vllm.npu_kvconnector")


class BatchCopy(Protocol):
    """Copies the blocks of a job on the current stream, which it does not wait for."""

    def __call__(
        self, moves: Sequence[tuple[Stack, Pairs]], *, to_host: bool, left: Callable[[], float]
    ) -> Iterator[int]:
        """Yield the bytes of each call; ``left`` tells the seconds that there are for the next one.

        Raise RuntimeError where the device refuses.
        """


def find_batch_copy(device: torch.device, region: HostRegion) -> BatchCopy | None:
    """Return what copies batches between ``device`` and ``region``, or None where there is no operator for them."""
    if device.type == "cuda":
        return _of_addresses(region)
    if device.type in {"npu", "cpu"}:
        return _of_pages(region)
    return None


def _of_addresses(region: HostRegion) -> BatchCopy | None:
    """Pin the region and return copies by vLLM's ``swap_blocks_batch``.

    That is ``cuMemcpyBatchAsync`` on CUDA from 12.8 on, one call a piece before that and on ROCm. The device does it by
    itself, so time is no matter.
    """
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region

    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        logger.warning("This vLLM has no operator swap_blocks_batch: the host tier is copied slowly, in steps")
        return None
    pin_mmap_region(region)  # cleanup() of the region unpins it

    def copy(moves: Sequence[tuple[Stack, Pairs]], *, to_host: bool, left: Callable[[], float]) -> Iterator[int]:
        parts = [stack.addresses(pairs) for stack, pairs in moves if len(pairs.blocks)]
        if not parts:
            return
        on_device, on_host, sizes = (torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))
        source, target = (on_device, on_host) if to_host else (on_host, on_device)
        # What a job loads is written to by nobody meanwhile, so the device may read it at once; what it stores may be
        # written to by steps before it.
        _custom_ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=not to_host)
        yield int(sizes.sum())

    return copy


def _of_pages(region: HostRegion) -> BatchCopy | None:
    """Return copies by ``torch.ops.npu_ops.copy_pages``: one launch moves what there is time for, on all threads."""
    with contextlib.suppress(ImportError):  # vLLM has logged that
        for plugin in importlib.metadata.entry_points(group="vllm.general_plugins", name="npu_ops"):
            plugin.load()  # siblings meet through entry points, not imports
    return _Pages(region.base_tensor) if hasattr(torch.ops.npu_ops, "_isa") else None  # without kernels: references


class _Pages:
    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    def __call__(
        self, moves: Sequence[tuple[Stack, Pairs]], *, to_host: bool, left: Callable[[], float]
    ) -> Iterator[int]:
        if not moves:
            return
        memories = [stack.memory for stack, _ in moves]
        shapes = [number for stack, pairs in moves for number in (*stack.shape, len(pairs.blocks))]
        pairs = torch.from_numpy(np.concatenate([stack.offsets(pairs) for stack, pairs in moves]))
        fragments = sum(stack.shape[0] * stack.shape[3] * len(pairs.blocks) for stack, pairs in moves)
        size = sum(stack.bytes_of_block * len(pairs.blocks) for stack, pairs in moves)
        progress, done = torch.zeros(1, dtype=torch.int64), 0
        while done < fragments:
            torch.ops.npu_ops.copy_pages(memories, self._host, shapes, pairs, progress, to_host, max(left(), 0.0))
            before, done = done, int(progress)
            yield done * size // fragments - before * size // fragments
