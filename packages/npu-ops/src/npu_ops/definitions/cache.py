"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from npu_ops.op import define


@define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping) -> ()"
)
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store one key and value a slot.

    key, value: [T, Hkv, D(v)]; caches: [blocks, Hkv, N, D(v)], strided views of one buffer are fine; slot_mapping:
    int64
    [<= T], block * N + offset, negative: skip.
    """
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    block, offset = slots // key_cache.shape[2], slots % key_cache.shape[2]
    n = slot_mapping.numel()
    key_cache[block, :, offset] = key[:n][valid]
    value_cache[block, :, offset] = value[:n][valid]
