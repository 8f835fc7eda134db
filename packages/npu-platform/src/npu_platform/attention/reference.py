"""Attention in plain torch ops, one request at a time: correct on any device, slower than npu-ops.

Method: Vaswani et al. 2017; ALiBi: Press et al. 2022; soft cap: Gemma 2 report 2024; sinks: Xiao et al. 2024.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key and value [tokens, heads, dim] into the caches [blocks, heads, block size, dim].

    slot_mapping int64 [tokens] holds block * block_size + offset; rows with a negative slot are padding.
    """
    kept = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[kept]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[kept].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[kept].to(value_cache.dtype)


def write_quantized_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As write_cache, into caches of float8_e4m3fn or int8 codes.

    key_scale and value_scale, float32: one, or one a head, are what a code is multiplied by to give the value; one a
    token and head, [blocks, heads, block size], are written, so that the largest value has the largest code.
    """
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        by_token = scale.dim() == 3
        scales = _token_scales(new, cache.dtype) if by_token else scale.expand(new.shape[1])[None]
        codes = _codes(new.float() / scales[..., None].masked_fill(scales[..., None] == 0, 1.0), cache.dtype)
        bits = cache.view(torch.int8)  # indexing knows no float8
        write_cache(codes.view(torch.int8), codes.view(torch.int8), bits, bits, slot_mapping)
        if by_token:
            column = scale[..., None]
            write_cache(scales[..., None], scales[..., None], column, column, slot_mapping)


def paged_attention_quantized(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
    *arguments: Any,
) -> None:
    """As paged_attention, over caches and scales as write_quantized_cache takes them."""
    keys, values = _values(key_cache, key_scale), _values(value_cache, value_scale)
    paged_attention(output, query, keys, values, *arguments)


def paged_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """Write into output [tokens, heads, dim] the attention of query [tokens, heads, dim] over the paged cache.

    key_cache and value_cache are [blocks, kv heads, block size, dim]; block_table int32 [requests, blocks];
    query_start_loc int32 [requests + 1]; seq_lens int32 [requests] counts this step's tokens too. A window of -1
    has no bound; soft_cap 0 is off; alibi_slopes and sinks are [heads].
    Into lse float32 [tokens, heads] goes the log of each row's sum, a sink included; rows that see nothing are left.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    block_size = key_cache.shape[2]
    for request, length in enumerate(lengths[: len(starts) - 1]):
        start, end = starts[request], starts[request + 1]
        if end <= start or length <= 0:
            continue
        blocks = block_table[request, : -(-length // block_size)].long()
        keys = _gather(key_cache, blocks, length)
        values = _gather(value_cache, blocks, length)
        bias = _bias(end - start, length, causal, window_left, window_right, alibi_slopes, query.device)
        output[start:end], sums = _attend(query[start:end], keys, values, scale, soft_cap, bias, sinks)
        if lse is not None:
            lse[start:end] = sums


def varlen_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """Write into output the attention of each request's queries over its own keys, all [tokens, heads, dim]."""
    starts = query_start_loc.tolist()
    for start, end in itertools.pairwise(starts):
        if end <= start:
            continue
        length = end - start
        bias = _bias(length, length, causal, window_left, window_right, alibi_slopes, query.device)
        keys, values = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
        output[start:end], sums = _attend(query[start:end], keys, values, scale, soft_cap, bias, sinks)
        if lse is not None:
            lse[start:end] = sums


def _largest_code(dtype: torch.dtype) -> float:
    return 448.0 if dtype == torch.float8_e4m3fn else 127.0


def _token_scales(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what brings the largest of each row of values [tokens, heads, dim] to the largest code."""
    return values.float().abs().amax(dim=-1) / _largest_code(dtype)


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes [blocks, heads, block size, dim] as float32 values."""
    return codes.float() * (scale[..., None] if scale.dim() == 3 else scale.reshape(-1, 1, 1))


def _codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = _largest_code(dtype)
    bounded = values.clamp(-most, most)
    return bounded.to(dtype) if dtype == torch.float8_e4m3fn else bounded.nan_to_num(0.0).round().to(dtype)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` cached rows of a request as [kv heads, length, dim]."""
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]


def _bias(
    query_len: int,
    length: int,
    causal: bool,
    window_left: int,
    window_right: int,
    alibi_slopes: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return what is added to the scores, float32 [1 or heads, query_len, length]: minus infinity where hidden."""
    query_pos = torch.arange(length - query_len, length, device=device)[:, None]
    key_pos = torch.arange(length, device=device)[None, :]
    hidden = torch.zeros(query_len, length, dtype=torch.bool, device=device)
    if causal:
        hidden |= key_pos > query_pos
    if window_left >= 0:
        hidden |= key_pos < query_pos - window_left
    if window_right >= 0:
        hidden |= key_pos > query_pos + window_right
    bias = torch.zeros(1, query_len, length, device=device)
    if alibi_slopes is not None:
        bias = alibi_slopes.float()[:, None, None] * (key_pos - query_pos).float()
    return bias.masked_fill(hidden, float("-inf"))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    soft_cap: float,
    bias: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend query [tokens, heads, dim] to keys and values [kv heads, length, dim], computing in float32.

    Returns that and the logs of the sums, [tokens, heads].
    """
    group = query.shape[1] // keys.shape[0]
    keys = keys.float().repeat_interleave(group, 0)
    values = values.float().repeat_interleave(group, 0)
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1).to(query.dtype), scores.logsumexp(-1).t()
