"""Layers that keep a state of fixed size for each sequence: causal convolution, selective scan, gated delta rule.

The requests of a batch are given alike to all three: state_indices int32 [R] is the slot of each request's state,
written in place; 0 (vLLM's null block) and what is no slot mean padding, whose tokens give zero. query_start_loc int32
[R + 1] says where each request's tokens begin; None: one token each. has_initial_state bool [R]; None: all; a request
without one starts from zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.op import define


def _requests(
    tokens: int, slots: Tensor, starts: Tensor | None, known: Tensor | None
) -> Iterator[tuple[int, range, bool]]:
    """Yield each request's slot, its tokens, and whether it has a state; those of padding have slot 0."""
    bounds = starts.tolist() if starts is not None else range(tokens + 1)
    for request, slot in enumerate(slots.tolist()):
        has_state = bool(known[request]) if known is not None else True
        yield max(slot, 0), range(bounds[request], bounds[request + 1]), has_state


def _like_x(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_indices, "
    "Tensor? query_start_loc, Tensor? has_initial_state, bool silu) -> Tensor",
    _like_x,
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    silu: bool,
) -> Tensor:
    """Convolve each channel over its token and the K - 1 before it; optionally SiLU.

    x: [T, C]; weight: [C, K], K 2 to 8, the last for the token itself; bias: [C]; state: [slots, C, K - 1] of x's dtype
    or float32, any strides: the last inputs, the oldest first. Returns [T, C].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y, width = torch.zeros_like(x), weight.shape[1]
    for slot, tokens, has_state in _requests(x.shape[0], state_indices, query_start_loc, has_initial_state):
        if slot == 0 or not tokens:
            continue
        before = state[slot] if has_state else torch.zeros_like(state[slot])
        inputs = torch.cat((before.to(wide), x[tokens.start : tokens.stop].to(wide).t()), dim=1)
        out = (inputs.unfold(1, width, 1) * weight.to(wide)[:, None]).sum(-1)
        out = out if bias is None else out + bias.to(wide)[:, None]
        y[tokens.start : tokens.stop] = (torch.nn.functional.silu(out) if silu else out).t().to(x.dtype)
        state[slot] = inputs[:, 1 - width :].to(state.dtype)
    return y


@define(
    "selective_scan(Tensor(a!) y, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
    "Tensor? z, Tensor(b!) state, Tensor state_indices, Tensor? query_start_loc, Tensor? has_initial_state) -> ()"
)
def selective_scan(
    y: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
) -> None:
    """Mamba-2 (arXiv 2405.21060): h = e^(dt a) h + dt x b^T; y = h c + d x; dt = softplus(dt + dt_bias); y *= silu(z).

    y, x, z: [T, H, P]; dt: [T, H]; a: float32 [H]; b, c: [T, G, N], G divides H; d, dt_bias: [H] of any float dtype;
    state: [slots, H, P, N], contiguous within a slot, of any of the three dtypes. Mamba-1 (arXiv 2312.00752) is H = 1
    with a: float32 [P, N], dt: [T, P], d and dt_bias: [P], state: [slots, P, N].
    """
    heads, width, size = x.shape[1], x.shape[2], b.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    by_channel = a.dim() == 2
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = torch.nn.functional.softplus(step)
    step = step[:, None, :] if by_channel else step[:, :, None].expand(-1, -1, width)  # [T, H, P]
    rate = a.to(wide)[None] if by_channel else a.to(wide)[:, None, None]
    b, c = (values.to(wide).repeat_interleave(heads // values.shape[1], dim=1) for values in (b, c))
    skip = 0 if d is None else (d.to(wide)[None] if by_channel else d.to(wide)[:, None])
    y.zero_()
    for slot, tokens, has_state in _requests(x.shape[0], state_indices, query_start_loc, has_initial_state):
        if slot == 0 or not tokens:
            continue
        h = state[slot].to(wide).view(heads, width, size) if has_state else x.new_zeros(heads, width, size, dtype=wide)
        for t in tokens:
            u = step[t] * x[t].to(wide)
            h = (step[t][..., None] * rate).exp() * h + u[..., None] * b[t][:, None]
            out = (h * c[t][:, None]).sum(-1) + skip * x[t].to(wide)
            y[t] = (out if z is None else out * torch.nn.functional.silu(z[t].to(wide))).to(y.dtype)
        state[slot] = h.view(state[slot].shape).to(state.dtype)


@define(
    "gated_delta_rule(Tensor(a!) out, Tensor qkv, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(b!) state, "
    "Tensor state_indices, Tensor? query_start_loc, Tensor? has_initial_state) -> ()"
)
def gated_delta_rule(
    out: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
) -> None:
    """Gated delta rule (arXiv 2412.06464): S = g S; S += beta (v - S k) k^T; out = S q.

    out: [T, Hv, Dv]; qkv: [T, 2 Hk Dk + Hv Dv], the heads' q, then k, then v; Hk divides Hv; q and k are brought to
    length one, and q is divided by the root of Dk. g = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b);
    a, b: [T, Hv]; a_log, dt_bias: [Hv] of any float dtype; state: [slots, Hv, Dv, Dk], contiguous within a slot.
    """
    heads, value_size, key_size = state.shape[1:]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    keys = (qkv.shape[1] - heads * value_size) // 2
    q, k, v = (
        part.unflatten(1, (-1, size))
        for part, size in zip(
            qkv.to(wide).split((keys, keys, heads * value_size), dim=1), (key_size, key_size, value_size), strict=True
        )
    )
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = ((x * s).repeat_interleave(heads // x.shape[1], dim=1) for x, s in ((q, key_size**-0.5), (k, 1.0)))
    decay = (-a_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))).exp()
    beta = b.to(wide).sigmoid()
    out.zero_()
    for slot, tokens, has_state in _requests(qkv.shape[0], state_indices, query_start_loc, has_initial_state):
        if slot == 0 or not tokens:
            continue
        memory = state[slot].to(wide) if has_state else torch.zeros_like(state[slot], dtype=wide)
        for t in tokens:
            memory = memory * decay[t][:, None, None]
            error = v[t] - (memory * k[t][:, None]).sum(-1)
            memory = memory + (beta[t][:, None] * error)[..., None] * k[t][:, None]
            out[t] = (memory * q[t][:, None]).sum(-1).to(out.dtype)
        state[slot] = memory.to(state.dtype)
