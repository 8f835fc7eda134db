"""The attention kernels: npu-ops' when it is installed, plain torch otherwise.

The two meet here and nowhere else; both take the same arguments (contract: ``torch.ops.npu_ops``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from npu_platform.attention import reference

MAX_NATIVE_HEAD_SIZE = 1024


@functools.cache
def has_native_ops() -> bool:
    """Say whether npu-ops has registered its attention kernels in this process."""
    return hasattr(torch.ops.npu_ops, "paged_attention")


def native_attention(head_size: int) -> bool:
    """Say whether the native kernels take this head size: a multiple of 8 up to 1024."""
    return has_native_ops() and 0 < head_size <= MAX_NATIVE_HEAD_SIZE and head_size % 8 == 0


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key and value [tokens, heads, dim] to the slots [tokens] of the caches [blocks, heads, block, dim]."""
    if has_native_ops():
        torch.ops.npu_ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    else:
        reference.write_cache(key, value, key_cache, value_cache, slot_mapping)


def write_quantized_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As write_cache, into caches of float8_e4m3fn or int8.

    The scales, float32, are given by tensor or by head, or written for each token and head: [blocks, heads, block].
    """
    if has_native_ops():
        torch.ops.npu_ops.reshape_and_cache_quantized(
            key, value, key_cache, value_cache, key_scale, value_scale, slot_mapping
        )
    else:
        reference.write_quantized_cache(key, value, key_cache, value_cache, key_scale, value_scale, slot_mapping)


def paged_attention_quantized(output: torch.Tensor, query: torch.Tensor, *arguments: Any) -> None:
    """As paged_attention over caches of codes; arguments as in :func:`reference.paged_attention_quantized`."""
    if native_attention(query.shape[-1]):
        torch.ops.npu_ops.paged_attention_quantized(output, query, *arguments)
    else:
        reference.paged_attention_quantized(output, query, *arguments)


def paged_attention(output: torch.Tensor, query: torch.Tensor, *arguments: Any) -> None:
    """Attend each request's queries to its cached keys; arguments as in :func:`reference.paged_attention`."""
    if native_attention(query.shape[-1]):
        torch.ops.npu_ops.paged_attention(output, query, *arguments)
    else:
        reference.paged_attention(output, query, *arguments)


def varlen_attention(output: torch.Tensor, query: torch.Tensor, *arguments: Any) -> None:
    """Attend each request's queries to its own keys; arguments as in :func:`reference.varlen_attention`."""
    if native_attention(query.shape[-1]):
        torch.ops.npu_ops.varlen_attention(output, query, *arguments)
    else:
        reference.varlen_attention(output, query, *arguments)
