"""What an attention layer does between its projection and attention, in one op."""

from __future__ import annotations

from torch import Tensor

from npu_ops.definitions.cache import reshape_and_cache
from npu_ops.definitions.layernorm import normed
from npu_ops.definitions.rotary import rotary_embedding
from npu_ops.op import define


@define(
    "qk_norm_rotary_and_cache(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? query_weight, "
    "Tensor? key_weight, float eps, Tensor cos_sin_cache, bool is_neox, Tensor(c!) key_cache, Tensor(d!) value_cache, "
    "Tensor slot_mapping) -> ()"
)
def qk_norm_rotary_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor,
    is_neox: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """rms_norm of each head, rotary_embedding, reshape_and_cache: query and key are written in place.

    positions: int64 [T]; query: [T, Hq, D], key and value: [T, Hkv, D(v)], strided views of one projection are fine;
    weights: [D], of the query's dtype or float32, or None for no norm; the rest is as in those ops, the caches in the
    query's dtype.
    """
    for heads, weight in ((query, query_weight), (key, key_weight)):
        if weight is not None:
            heads.copy_(normed(heads.float(), weight, eps, heads.dtype))
    rotary_embedding.reference(positions, query, key, query.shape[-1], cos_sin_cache, is_neox)
    reshape_and_cache.reference(key, value, key_cache, value_cache, slot_mapping)
