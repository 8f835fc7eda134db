"""Gives vLLM's layers that keep a state the kernels: Mamba-1, Mamba-2, short convolution, Qwen's gated delta net."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only import (
    selective_state_update_replayssm_output_only,
)
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

ops = torch.ops.npu_ops


@dataclass(frozen=True)
class Part:
    """Requests of a step that are alike: its decodes, of one token each, or its prompts."""

    tokens: slice
    state_indices: Tensor
    query_start_loc: Tensor | None
    has_initial_state: Tensor | None

    def requests(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what the ops want to know of the requests, in their order."""
        return self.state_indices, self.query_start_loc, self.has_initial_state


@dataclass(frozen=True)
class Drafts:
    """Decodes with drafts: each token leaves a state in a slot of its own, until it is known which of them counts."""

    slots: Tensor
    """int32 [R, most tokens of a request]; 0 for padding."""
    accepted: Tensor
    """int [R]: how many of the tokens of the step before count, so that the state after the last of them goes on."""
    query_start_loc: Tensor
    """int32 [R + 1]"""

    def update(
        self, run: Callable[..., None], output: Tensor, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...]
    ) -> None:
        """Write output [T, ...] token by token: run(output, *inputs, part) for the first of each request, and so on.

        inputs: [T, ...]; states: [slots, ...]. A request with fewer tokens pads the rest with slot 0.
        """
        starts, tokens = self.query_start_loc[:-1].long(), torch.arange(output.shape[0], device=output.device)
        lengths = self.query_start_loc.diff()
        before = self.slots.gather(1, (self.accepted.long() - 1).clamp_min(0)[:, None])[:, 0]
        outputs = []
        for number, slot in enumerate(self.slots.unbind(1)):
            is_padding = lengths <= number
            now, before = slot.masked_fill(is_padding, 0), before.masked_fill(is_padding, 0)
            for state in states:
                state.index_copy_(0, now.long(), state[before.long()])
            rows = (starts + number).clamp_max(output.shape[0] - 1)
            outputs.append(output.new_empty(len(rows), *output.shape[1:]))
            part = Part(slice(0, len(rows)), now, None, None)
            run(outputs[-1], *(values[rows] for values in inputs), part)
            before = now
        request = torch.searchsorted(self.query_start_loc[1:], tokens.int(), right=True).clamp_max(len(starts) - 1)
        place = (tokens - starts[request]).clamp_max(len(outputs) - 1)
        output.copy_(torch.stack(outputs)[place, request])


class LayerWithKernels(MambaBase):
    """What the layers below have in common."""

    has_npu_kernels = True
    rolls_back = True
    """Whether the states of drafts that are not accepted leave no trace."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return what builds a step's metadata.

        vLLM's own method refuses batch-invariant mode for its Triton kernels, and the V2 runner asks what it returns;
        these kernels update a state token by token.
        """
        return _for_any_batch(self.mamba_type.get_class())


@MambaMixer.register_oot(name="MambaMixer")
class NpuMambaMixer(LayerWithKernels, MambaMixer):
    """Mamba-1 on the kernels."""

    rolls_back = False  # vLLM does not say of it how many drafts were accepted

    def forward_impl(self, hidden_states: Tensor, output: Tensor) -> None:
        """hidden_states: [T, H]; writes output [T, H]."""
        x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        metadata = _metadata_of(self)
        if metadata is None:  # the memory profile, before there is a state
            output[:] = self.out_proj(x.contiguous())[0]
            return
        conv_state, state = _conv_state(self, self.conv1d), self.kv_cache[1]
        scanned = torch.empty_like(x[: metadata.num_decode_tokens + metadata.num_prefill_tokens])
        for part in _parts(metadata):
            mixed = _convolve(self.conv1d, x[part.tokens], conv_state, part, self.activation)
            dt, b, c = self._ssm_transform(mixed)
            ops.selective_scan(
                scanned[part.tokens][:, None],
                mixed[:, None],
                dt.transpose(0, 1),
                self.A.data,
                b[:, None],
                c[:, None],
                self.D.data,
                self.dt_proj.bias,
                gate[part.tokens][:, None],
                state,
                *part.requests(),
            )
        output[: scanned.shape[0]] = self.out_proj(scanned)[0]


@MambaMixer2.register_oot(name="MambaMixer2")
class NpuMambaMixer2(LayerWithKernels, MambaMixer2):
    """Mamba-2 on the kernels."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return the states' sizes, without vLLM's checkpoints inside a step: steps end where a state is cached."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """projected_states: [T, gate, convolved, dt side by side]; writes output [T, heads * width]."""
        mixed, dt = projected_states[..., self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        metadata = _metadata_of(self)
        if metadata is None:
            output.zero_()
            return
        drafts, tokens = _drafts(metadata), metadata.num_decode_tokens
        if drafts is not None:
            states = _conv_state(self, self.conv1d), self.kv_cache[1]
            drafts.update(self._scan, output[:tokens], (mixed[:tokens], dt[:tokens]), states)
        for part in _parts(metadata):
            self._scan(output, mixed, dt, part)

    def _scan(self, output: Tensor, mixed: Tensor, dt: Tensor, part: Part) -> None:
        groups = self.n_groups // self.tp_size
        conv_state = _conv_state(self, self.conv1d)
        convolved = _convolve(self.conv1d, mixed[part.tokens], conv_state, part, self.activation)
        x, b, c = self.split_hidden_states_B_C_fn(convolved)
        output, x = (each.unflatten(1, (-1, self.head_dim)) for each in (output[part.tokens], x))
        dt = dt[part.tokens]
        b, c = (each.unflatten(1, (groups, -1)) for each in (b, c))
        if self.use_replayssm and part.query_start_loc is None:
            self._replay(output, x, dt, b, c, part)
            return
        ops.selective_scan(
            output,
            x,
            dt,
            self.A.data,
            b,
            c,
            self.D.data,
            self.dt_bias.data,
            None,
            self.kv_cache[1],
            *part.requests(),
        )

    def _replay(self, output: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, part: Part) -> None:
        """Decode from the state of some steps ago and the inputs since, which vLLM's Triton kernel (ReplaySSM) keeps.

        output, x: [T, heads, width]; dt: [T, heads]; b, c: [T, groups, state]. Prompts write states as usual.
        """
        metadata, (state, *inputs_since) = _metadata_of(self), self.kv_cache[1:]
        by_width = -1, self.head_dim
        selective_state_update_replayssm_output_only(
            state,
            x,
            dt[..., None].expand(-1, *by_width),
            self.A.data[:, None, None].expand(*by_width, self.ssm_state_size),
            b,
            c,
            self.D.data[:, None].expand(by_width),
            self.dt_bias.data[:, None].expand(by_width),
            dt_softplus=True,
            **dict(zip(("x_cache", "dt_cache", "B_cache"), inputs_since, strict=True)),
            bc_pre=metadata.bc_pre_scratch,
            write_pos=metadata.write_pos_d,
            is_flush=metadata.is_flush_d,
            max_cache_len=self.replayssm_buffer_len,
            state_batch_indices=part.state_indices,
            out=output,
        )


@ShortConv.register_oot(name="ShortConv")
class NpuShortConv(LayerWithKernels, ShortConv):
    """LFM2's gated short convolution on the kernel."""

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> None:
        """hidden_states: [T, H]; writes output [T, H]; vLLM calls this name on every device but the CPU."""
        b, c, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        inputs = b * x
        metadata = _metadata_of(self)
        if metadata is None:
            output[:] = self.out_proj(c * inputs)[0]
            return
        convolved = [self._convolved(inputs, part) for part in _parts(metadata)]
        drafts, tokens = _drafts(metadata), metadata.num_decode_tokens
        if drafts is not None:
            convolved.insert(0, torch.empty_like(inputs[:tokens]))
            drafts.update(self._write_convolved, convolved[0], (inputs[:tokens],), (_conv_state(self, self.conv),))
        mixed = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
        output[: mixed.shape[0]] = self.out_proj(c[: mixed.shape[0]] * mixed)[0]

    def _convolved(self, inputs: Tensor, part: Part) -> Tensor:
        return _convolve(self.conv, inputs[part.tokens], _conv_state(self, self.conv), part, activation=None)

    def _write_convolved(self, output: Tensor, inputs: Tensor, part: Part) -> None:
        output.copy_(self._convolved(inputs, part))


@QwenGatedDeltaNetAttention.register_oot(name="QwenGatedDeltaNetAttention")
class NpuQwenGatedDeltaNetAttention(LayerWithKernels, QwenGatedDeltaNetAttention):
    """The gated delta net of Qwen3-Next and Qwen3.5 on the kernels."""

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """mixed_qkv: [T, q, k, v side by side]; a, b: [T, heads]; writes core_attn_out [T, heads, width]."""
        metadata = _metadata_of(self)
        if metadata is None:
            return
        count = metadata.num_actual_tokens
        inputs = mixed_qkv[:count], a[:count], b[:count]
        if metadata.spec_sequence_masks is None:
            prompts = metadata.num_prefills > 0
            requests = metadata.num_decodes + metadata.num_prefills if prompts else count
            part = _gated_part(metadata, count, requests, prompts)
            self._apply_rule(core_attn_out[:count], *inputs, part)
            return
        drafts = Drafts(metadata.spec_state_indices_tensor, metadata.num_accepted_tokens, metadata.spec_query_start_loc)
        states = _conv_state(self, self.conv1d), self.kv_cache[1]
        if not metadata.num_prefills:
            drafts.update(self._apply_rule, core_attn_out[:count], inputs, states)
            return
        drafted, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        outputs = [core_attn_out.new_empty(len(rows), *core_attn_out.shape[1:]) for rows in (drafted, others)]
        drafts.update(self._apply_rule, outputs[0], tuple(values[drafted] for values in inputs), states)
        part = _gated_part(metadata, len(others), metadata.num_prefills, prompts=True)
        self._apply_rule(outputs[1], mixed_qkv[others], a[others], b[others], part)
        for rows, output in zip((drafted, others), outputs, strict=True):
            core_attn_out.index_copy_(0, rows.long(), output)

    def _apply_rule(self, output: Tensor, mixed_qkv: Tensor, a: Tensor, b: Tensor, part: Part) -> None:
        conv_state = _conv_state(self, self.conv1d)
        mixed = _convolve(self.conv1d, mixed_qkv, conv_state, part, self.activation)
        rates = self.A_log.data, self.dt_bias.data
        ops.gated_delta_rule(output, mixed, a, b, *rates, self.kv_cache[1], *part.requests())


@Mixer2RMSNormGated.register_oot(name="Mixer2RMSNormGated")
class NpuMixer2RMSNormGated(Mixer2RMSNormGated):
    """Mamba-2's norm behind its gate on the kernel; groups that are split over ranks stay with vLLM's own code."""

    def forward_oot(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [T, H]."""
        if not self.use_rms_norm or self.tp_size > 1:
            return self.forward_native(x, gate)
        return ops.gated_rms_norm(x, gate, self.weight.data, self.variance_epsilon, self.group_size, False, False)


@RMSNormGated.register_oot(name="RMSNormGated")
class NpuRMSNormGated(RMSNormGated):
    """The gated delta net's norm before its gate on the kernel."""

    def forward_oot(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x, z: [..., H]."""
        if z is None:
            return self.forward_native(x, z)
        group = self.group_size or x.shape[-1]
        sigmoid = self.activation == "sigmoid"
        return ops.gated_rms_norm(x, z, self.weight.data, self.eps, group, self.norm_before_gate, sigmoid)


@functools.cache
def _for_any_batch(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return `backend`, by the same name, as one whose results do not depend on what shares the batch."""
    names = {"__module__": backend.__module__, "__qualname__": backend.__qualname__}
    says_so = {"supports_batch_invariance": classmethod(lambda cls: True)}
    return type(backend.__name__, (backend,), names | says_so)


def _metadata_of(layer: Any) -> Any:
    """Return the step's metadata of `layer`; None while the memory is profiled."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def _parts(metadata: Any) -> Iterator[Part]:
    """Yield the decodes without drafts and the prompts of a step; vLLM puts the decodes first."""
    decodes, prompts = metadata.num_decode_tokens, metadata.num_prefill_tokens
    if decodes and _drafts(metadata) is None:
        yield Part(slice(0, decodes), metadata.state_indices_tensor_d[:decodes, 0], None, None)
    if prompts:
        yield Part(
            slice(decodes, decodes + prompts),
            metadata.state_indices_tensor_p,
            metadata.query_start_loc_p,
            metadata.has_initial_states_p,
        )


def _drafts(metadata: Any) -> Drafts | None:
    """Return a step's decodes where a request may have drafts."""
    if not metadata.num_decode_tokens or metadata.query_start_loc_d is None:
        return None
    return Drafts(metadata.state_indices_tensor_d, metadata.num_accepted_tokens, metadata.query_start_loc_d)


def _gated_part(metadata: Any, tokens: int, requests: int, prompts: bool) -> Part:
    """Return the requests without drafts of a gated delta net's step."""
    return Part(
        slice(0, tokens),
        metadata.non_spec_state_indices_tensor[:requests],
        metadata.non_spec_query_start_loc[: requests + 1] if prompts else None,
        metadata.has_initial_state[:requests] if prompts else None,
    )


def _conv_state(layer: Any, conv: Any) -> Tensor:
    """Return the state of the layer's convolution as [slots, channels, width - 1], however it is stored.

    With drafts vLLM makes it longer, so that the inputs of all of them fit in; here they have slots of their own.
    """
    state: Tensor = layer.kv_cache[0]
    state = state if is_conv_state_dim_first() else state.transpose(-1, -2)
    return state[..., : conv.weight.shape[-1] - 1]


def _convolve(conv: Any, x: Tensor, state: Tensor, part: Part, activation: str | None) -> Tensor:
    """Run `conv` over x [T, channels] of the part's requests; its weight is [channels, 1, width]."""
    bias = None if conv.bias is None else conv.bias.data
    return ops.causal_conv1d(x, conv.weight.data[:, 0], bias, state, *part.requests(), activation in ("silu", "swish"))
