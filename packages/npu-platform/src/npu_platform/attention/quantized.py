"""The KV cache in 8-bit codes: which formats there are, and where codes and scales lie in a page.

``fp8`` (e4m3) has scales by tensor or by head, from the checkpoint or 1. ``fp8_per_token_head`` and
``int8_per_token_head`` have one for each token and head, measured when it is written, and behind its codes: a token of
a head is key, its scale, value, its scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

QUANTIZED_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
"""Torch's dtype of the codes for each name of ``--kv-cache-dtype``."""

_SCALE_BYTES = 4


def with_token_scales(spec: AttentionSpec) -> AttentionSpec:
    """Return `spec` with room for the scales, if its format has them by token and head."""
    if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES)


def split_codes(
    kv_cache: torch.Tensor, kv_cache_dtype: str, head_size: int, layer: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the codes of keys and values [blocks, heads, block size, dim], and their scales."""
    codes = kv_cache.view(QUANTIZED_CACHES[kv_cache_dtype])
    if not kv_cache_dtype.endswith("per_token_head"):
        return codes[..., :head_size], codes[..., head_size:], layer._k_scale, layer._v_scale  # type: ignore[return-value]
    values = head_size + _SCALE_BYTES
    words = kv_cache.view(torch.float32)
    key_scale, value_scale = words[..., head_size // _SCALE_BYTES], words[..., -1]
    return codes[..., :head_size], codes[..., values:-_SCALE_BYTES], key_scale, value_scale
