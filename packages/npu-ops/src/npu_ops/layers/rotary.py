"""Gives vLLM's rotary embeddings the kernels: one class of ours for each class of vLLM that a text model instantiates.

Left to vLLM's own code, because they rotate otherwise: FourierRotaryEmbedding, DualChunkRotaryEmbedding, Ernie 4.5's,
Bailing's and the interleaved multimodal classes, and Llama 4's vision rotation. Phi3LongRoPE is no CustomOp, so nobody
can replace it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.gemma4_rope import Gemma4RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

ops = torch.ops.npu_ops

Rotated = tuple[Tensor, Tensor | None]


def _takes(layer: RotaryEmbeddingBase, positions: Tensor, *rotated: Tensor | None) -> bool:
    """Whether the kernel has what this call needs: dense rows, two or three dimensions, the cache's device."""
    if positions.dtype != torch.int64 or layer.cos_sin_cache.shape[-1] != layer.rotary_dim:
        return False
    tokens = positions.shape[-1]
    return all(
        x is None
        or (
            x.device == layer.cos_sin_cache.device
            and x.dim() in (2, 3)
            and x.shape[0] == tokens
            and x.stride(-1) == 1
            and x.shape[-1] % layer.head_size == 0
        )
        for x in rotated
    )


class PlainRotary:
    """Mixin: one position a token."""

    def forward_oot(
        self: RotaryEmbeddingBase,  # type: ignore[misc]
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
    ) -> Rotated:
        """positions: int64 [T]; query, key: [T, heads * head_size] or 3-D, rotated in place and returned."""
        if positions.dim() != 1 or not _takes(self, positions, query, key):
            return self.forward_native(positions, query, key)
        ops.rotary_embedding(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style)
        return query, key


for _base in (
    RotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
):
    _base.register_oot(name=_base.__name__)(type(f"Npu{_base.__name__}", (PlainRotary, _base), {}))


@MRotaryEmbedding.register_oot(name="MRotaryEmbedding")
class NpuMRotaryEmbedding(MRotaryEmbedding):
    """One position a token, or three (time, height, width)."""

    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> Rotated:
        """positions: int64 [T] or [3, T]; the rest as PlainRotary."""
        if offsets is not None or positions.stride(-1) != 1 or not _takes(self, positions, query, key):
            return self.forward_native(positions, query, key, offsets)
        table, neox = self.cos_sin_cache, self.is_neox_style
        if positions.dim() == 1:
            ops.rotary_embedding(positions, query, key, self.head_size, table, neox)
            return query, key
        sections = list(self.mrope_section)
        ops.multimodal_rotary_embedding(
            positions, query, key, self.head_size, table, neox, sections, self.mrope_interleaved
        )
        return query, key


@DeepseekScalingRotaryEmbedding.register_oot(name="DeepseekScalingRotaryEmbedding")
class NpuDeepseekScalingRotaryEmbedding(DeepseekScalingRotaryEmbedding):
    """DeepSeek's YaRN: query and key are [T, heads, head_size]."""

    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> Rotated:
        """As PlainRotary."""
        if offsets is not None or positions.dim() != 1 or not _takes(self, positions, query, key):
            return self.forward_native(positions, query, key, offsets)
        ops.rotary_embedding(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style)
        return query, key
