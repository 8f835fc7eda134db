"""Attention over a paged cache or over plain keys.

The ops write `output`, and `lse` where it is given: by it parts of one attention, each over other keys, are joined
(flash decoding, Dao et al. 2023). The references are plain loops in float32: what the kernels must equal, not what
anybody should run.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from npu_ops.op import define


@define(
    "paged_attention(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, int window_left, int window_right, "
    "float soft_cap, Tensor? alibi_slopes, Tensor? sinks, Tensor(b!)? lse=None) -> ()"
)
def paged_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
) -> None:
    """Decode, chunked prefill and mixed batches in one op.

    output, query: [T, Hq, D(v)] or [T, Hq * D(v)]; caches: [blocks, Hkv, N, D(v)], by strides; block_table: int32
    [R, M]; query_start_loc: int32 [R + 1]; seq_lens: int32 [R], the new tokens included. Query j of request r sits at
    position seq_len - q_len + j. Keys beyond the window (-1: unlimited) or, if causal, ahead of the query are not
    visible. soft_cap: 0, or cap * tanh(s / cap). alibi_slopes: float32 [Hq], adds slope * (pos_k - pos_q). sinks: [Hq],
    a logit that only enters the sum. lse: float32 [T, Hq], the log of each row's sum of exp(logit), the sink included.
    Requests with seq_len <= 0 or without queries leave their rows as they are; a query that sees no key gives zeros,
    and a sum of log -inf. Of values that no step has, the native kernels take a block outside of the cache for block 0
    and a seq_len beyond M blocks for M blocks, and leave out a request with a negative start.
    """
    out, q = _heads(output, value_cache.shape[3]), _heads(query, key_cache.shape[3])
    block_size = key_cache.shape[2]
    starts = query_start_loc.tolist()
    for r, keys in enumerate(seq_lens.tolist()[: len(starts) - 1]):
        start, end = starts[r], min(starts[r + 1], q.shape[0])
        if keys <= 0 or end <= start:
            continue
        blocks = block_table[r, : -(-keys // block_size)].long()
        k = key_cache[blocks].transpose(1, 2).flatten(0, 1)[:keys]
        v = value_cache[blocks].transpose(1, 2).flatten(0, 1)[:keys]
        mask = _visible(end - start, keys, causal, window_left, window_right, q.device)
        out[start:end], sums = _attend(q[start:end], k, v, scale, mask, soft_cap, alibi_slopes, sinks)
        if lse is not None:
            lse[start:end] = sums


@define(
    "paged_attention_quantized(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor key_scale, Tensor value_scale, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "float scale, bool causal, int window_left, int window_right, float soft_cap, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor(b!)? lse=None) -> ()"
)
def paged_attention_quantized(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
) -> None:
    """paged_attention over caches of 8-bit codes: float8_e4m3fn or int8, each times its scale.

    key_scale, value_scale: float32, one, [Hkv], or one a token and head, [blocks, Hkv, N] by strides.
    The code that float8_e4m3fn calls NaN counts as 480; a scale that is NaN makes NaN of what it scales.
    """
    caches = (dequantized(key_cache, key_scale), dequantized(value_cache, value_scale))
    out = torch.empty_like(output, dtype=torch.float32).copy_(output)
    paged_attention.reference(
        out,
        query.float(),
        *caches,
        block_table,
        query_start_loc,
        seq_lens,
        scale,
        causal,
        window_left,
        window_right,
        soft_cap,
        alibi_slopes,
        sinks,
        lse,
    )
    output.copy_(out)


def dequantized(cache: Tensor, scale: Tensor) -> Tensor:
    """The values of 8-bit codes [blocks, Hkv, N, D] in float32; scale as in paged_attention_quantized."""
    values = cache.float()
    if cache.dtype == torch.float8_e4m3fn:
        values = values.nan_to_num(480.0)
    return values * (scale[..., None] if scale.dim() == 3 else scale.view(-1, 1, 1))


@define(
    "varlen_attention(Tensor(a!) output, Tensor query, Tensor key, Tensor value, Tensor query_start_loc, float scale, "
    "bool causal, int window_left, int window_right, float soft_cap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor(b!)? lse=None) -> ()"
)
def varlen_attention(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
) -> None:
    """Attention of each sequence to itself, without a cache (encoders).

    key, value: [T, Hkv, D(v)]; the rest as paged_attention.
    """
    out, q = _heads(output, value.shape[2]), _heads(query, key.shape[2])
    starts = query_start_loc.tolist()
    for start, next_start in pairwise(starts):
        end = min(next_start, q.shape[0])
        if end > start:
            mask = _visible(end - start, end - start, causal, window_left, window_right, q.device)
            out[start:end], sums = _attend(
                q[start:end], key[start:end], value[start:end], scale, mask, soft_cap, alibi_slopes, sinks
            )
            if lse is not None:
                lse[start:end] = sums


def _heads(x: Tensor, size: int) -> Tensor:
    return x if x.dim() == 3 else x.unflatten(-1, (-1, size))


def _visible(queries: int, keys: int, causal: bool, left: int, right: int, device: torch.device) -> Tensor:
    """bool [queries, keys]."""
    distance = torch.arange(keys, device=device)[None] - torch.arange(keys - queries, keys, device=device)[:, None]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        mask &= distance <= 0
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q: [Q, Hq, D], k, v: [K, Hkv, D(v)], mask: [Q, K]. Returns [Q, Hq, Dv] in q's dtype; all sums in float32.

    And the logs of the sums, [Q, Hq].
    """
    group = q.shape[1] // k.shape[1]
    k32, v32 = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k32) * scale
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if alibi_slopes is not None:
        queries, keys = mask.shape
        distance = (
            torch.arange(keys, device=q.device)[None] - torch.arange(keys - queries, keys, device=q.device)[:, None]
        )
        logits = logits + alibi_slopes.float()[:, None, None] * distance
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0) if not mask.any(-1).all() else torch.softmax(logits, dim=-1)
    attended = torch.einsum("hqk,khd->qhd", weights[..., : k.shape[0]], v32).to(q.dtype)
    return attended, torch.logsumexp(logits, dim=-1).t()
