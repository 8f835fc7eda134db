"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_ops.op import define


@define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()"
)
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store one key and value a slot.

    key, value: [T, Hkv, D(v)]; caches: [blocks, Hkv, N, D(v)], strided views of one buffer are fine; slot_mapping:
    int64 [<= T], block * N + offset; a slot that is none of the caches, as a negative one, is skipped.
    """
    valid = _slots_of(slot_mapping, key_cache)
    slots = slot_mapping[valid]
    block, offset = slots // key_cache.shape[2], slots % key_cache.shape[2]
    n = slot_mapping.numel()
    key_cache[block, :, offset] = key[:n][valid]
    value_cache[block, :, offset] = value[:n][valid]


@define(
    "reshape_and_cache_quantized(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor(c!) key_scale, Tensor(d!) value_scale, Tensor slot_mapping) -> ()"
)
def reshape_and_cache_quantized(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """reshape_and_cache into caches of 8-bit codes, float8_e4m3fn or int8, rounded to nearest even and saturating.

    key_scale, value_scale: float32. With one or [Hkv] they are given, and a code stands for value / scale. With one a
    token and head, [blocks, Hkv, N] by strides, they are written: the largest magnitude of the head over the largest
    code, NaN where there is one. By a given scale NaN becomes e4m3's code for it, and 0 in int8, which has none.
    """
    valid = _slots_of(slot_mapping, key_cache)
    slots = slot_mapping[valid]
    block, offset = slots // key_cache.shape[2], slots % key_cache.shape[2]
    n = slot_mapping.numel()
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        rows = new[:n][valid].float()
        if scale.dim() == 3:
            of_row = rows.abs().amax(dim=-1) / largest_code(cache.dtype)
            scale[block, :, offset] = of_row
        else:
            of_row = scale.expand(rows.shape[1])[None]
        cache[block, :, offset] = quantized(rows, of_row[..., None], cache.dtype)


def _slots_of(slot_mapping: Tensor, cache: Tensor) -> Tensor:
    """Which of slot_mapping are slots of the cache [blocks, Hkv, N, D]: bool of its shape."""
    return (slot_mapping >= 0) & (slot_mapping < cache.shape[0] * cache.shape[2])


def largest_code(dtype: torch.dtype) -> float:
    """The largest magnitude that codes of `dtype` use: 448 or 127."""
    return 448.0 if dtype == torch.float8_e4m3fn else 127.0


def quantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of float32 values; where the scale is 0 all values are, and the codes too."""
    most = largest_code(dtype)
    codes = torch.where(scale == 0, 0.0, values / scale).clamp(-most, most)
    return codes.to(dtype) if dtype == torch.float8_e4m3fn else codes.nan_to_num(0.0).round().to(dtype)
