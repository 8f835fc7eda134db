"""Gives vLLM's layers that keep a state the kernels: Mamba-1, Mamba-2, short convolution, Qwen's gated delta net."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import AttentionBackend

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


class LayerWithKernels(MambaBase):
    """What the layers below have in common."""

    has_npu_kernels = True

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return what builds a step's metadata.

        vLLM's own method refuses batch-invariant mode for its Triton kernels; these update a state token by token.
        """
        return self.mamba_type.get_class()


@MambaMixer.register_oot(name="MambaMixer")
class NpuMambaMixer(LayerWithKernels, MambaMixer):
    """Mamba-1 on the kernels."""

    def forward_impl(self, hidden_states: Tensor, output: Tensor) -> None:
        """hidden_states: [T, H]; writes output [T, H]."""
        x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        metadata = _metadata_of(self)
        if metadata is None:  # the memory profile, before there is a state
            output[:] = self.out_proj(x.contiguous())[0]
            return
        conv_state, state = _conv_state(self), self.kv_cache[1]
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

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """projected_states: [T, gate, convolved, dt side by side]; writes output [T, heads * width]."""
        mixed, dt = projected_states[..., self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        metadata = _metadata_of(self)
        if metadata is None:
            output.zero_()
            return
        conv_state, state = _conv_state(self), self.kv_cache[1]
        groups = self.n_groups // self.tp_size
        for part in _parts(metadata):
            convolved = _convolve(self.conv1d, mixed[part.tokens], conv_state, part, self.activation)
            x, b, c = self.split_hidden_states_B_C_fn(convolved)
            ops.selective_scan(
                output[part.tokens].unflatten(1, (-1, self.head_dim)),
                x.unflatten(1, (-1, self.head_dim)),
                dt[part.tokens],
                self.A.data,
                b.unflatten(1, (groups, -1)),
                c.unflatten(1, (groups, -1)),
                self.D.data,
                self.dt_bias.data,
                None,
                state,
                *part.requests(),
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
        conv_state = _conv_state(self)
        convolved = [
            _convolve(self.conv, inputs[part.tokens], conv_state, part, activation=None) for part in _parts(metadata)
        ]
        mixed = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
        output[: mixed.shape[0]] = self.out_proj(c[: mixed.shape[0]] * mixed)[0]


@QwenGatedDeltaNetAttention.register_oot(name="QwenGatedDeltaNetAttention")
class NpuQwenGatedDeltaNetAttention(LayerWithKernels, QwenGatedDeltaNetAttention):
    """The gated delta net of Qwen3-Next and Qwen3.5 on the kernels."""

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """mixed_qkv: [T, q, k, v side by side]; a, b: [T, heads]; writes core_attn_out [T, heads, width]."""
        metadata = _metadata_of(self)
        if metadata is None:
            return
        count = metadata.num_actual_tokens
        prompts = metadata.num_prefills > 0
        requests = metadata.num_decodes + metadata.num_prefills if prompts else count
        part = Part(
            slice(0, count),
            metadata.non_spec_state_indices_tensor[:requests],
            metadata.non_spec_query_start_loc[: requests + 1] if prompts else None,
            metadata.has_initial_state[:requests] if prompts else None,
        )
        mixed = _convolve(self.conv1d, mixed_qkv[:count], _conv_state(self), part, self.activation)
        ops.gated_delta_rule(
            core_attn_out[:count],
            mixed,
            a[:count],
            b[:count],
            self.A_log.data,
            self.dt_bias.data,
            self.kv_cache[1],
            *part.requests(),
        )


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


def _metadata_of(layer: Any) -> Any:
    """Return the step's metadata of `layer`; None while the memory is profiled."""
    metadata = get_forward_context().attn_metadata
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def _parts(metadata: Any) -> Iterator[Part]:
    """Yield the decodes and the prompts of a step; vLLM puts the decodes first."""
    decodes, prompts = metadata.num_decode_tokens, metadata.num_prefill_tokens
    if decodes:
        yield Part(slice(0, decodes), metadata.state_indices_tensor_d[:decodes, 0], None, None)
    if prompts:
        yield Part(
            slice(decodes, decodes + prompts),
            metadata.state_indices_tensor_p,
            metadata.query_start_loc_p,
            metadata.has_initial_states_p,
        )


def _conv_state(layer: Any) -> Tensor:
    """Return the convolution's state as [slots, channels, width - 1], however it is stored."""
    state: Tensor = layer.kv_cache[0]
    return state if is_conv_state_dim_first() else state.transpose(-1, -2)


def _convolve(conv: Any, x: Tensor, state: Tensor, part: Part, activation: str | None) -> Tensor:
    """Run `conv` over x [T, channels] of the part's requests; its weight is [channels, 1, width]."""
    bias = None if conv.bias is None else conv.bias.data
    return ops.causal_conv1d(x, conv.weight.data[:, 0], bias, state, *part.requests(), activation in ("silu", "swish"))
