"""Which tensors hold the bytes of a KV cache block, so that a block's next owner can start from zeros."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup


class BlockZeroer:
    """Fills blocks of the KV cache with zeros; takes the place of vLLM's, which is a Triton kernel over raw addresses.

    Args:
        caches: what :func:`caches_by_block` returns.
        device: where they are.
    """

    def __init__(self, caches: list[torch.Tensor], device: torch.device) -> None:
        self._caches = caches
        self._device = device

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Fill these blocks, in the scheduler's count."""
        blocks = torch.tensor(block_ids, device=self._device)
        for cache in self._caches:
            cache.index_fill_(0, blocks, 0)

    def warmup(self, num_kv_blocks: int) -> None:
        """Do nothing: there is nothing to compile."""


def caches_by_block(
    groups: Iterable[AttentionGroup], layers: Mapping[str, Any], skipped: Collection[str], num_blocks: int
) -> list[torch.Tensor]:
    """Return the attention caches as views [num_blocks, ...], in whose first dimension the scheduler counts.

    Layers that share a cache give one view; where their views of it differ, as they do for caches of several
    precisions, each counts. States of state-space layers have none: a request's first tokens start from zero
    whatever is there.
    """
    views: dict[tuple[Any, ...], torch.Tensor] = {}
    for group in groups:
        if not isinstance(group.kv_cache_spec, AttentionSpec):
            continue
        for name in group.layer_names:
            cache = layers[name].kv_cache
            if name in skipped or not isinstance(cache, torch.Tensor) or not cache.numel():
                continue
            if group.kernel_block_stride:
                cache = group.map_kv_cache_to_manager_blocks(cache, num_blocks)
            view = cache.unflatten(0, (num_blocks, -1))
            views[view.data_ptr(), view.dtype, view.shape, view.stride()] = view
    return list(views.values())
