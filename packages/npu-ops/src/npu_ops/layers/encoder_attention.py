"""Gives the attention of multimodal encoders (vision, audio) the kernel for sequences without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

ops = torch.ops.npu_ops

_LARGEST_HEAD = 1024


@MMEncoderAttention.register_oot(name="MMEncoderAttention")
class NpuMMEncoderAttention(MMEncoderAttention):
    """Each image, window or recording attends to itself."""

    def forward_oot(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """query, key, value: [batch, tokens, heads * size] or [batch, tokens, heads, size]; returns query's shape.

        cu_seqlens: int [sequences + 1], where each starts among all tokens; None: each row of the batch is one.
        """
        batch, tokens = query.shape[:2]
        if key.shape[1] != tokens or self.head_size % 8 or self.head_size > _LARGEST_HEAD:
            return self.forward_native(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
        starts = torch.arange(batch + 1, device=query.device) * tokens if cu_seqlens is None else cu_seqlens
        output = query.new_empty(batch * tokens, self.num_heads, self.head_size)
        ops.varlen_attention(
            output,
            query.reshape(output.shape),
            key.reshape(-1, self.num_kv_heads, self.head_size),
            value.reshape(-1, self.num_kv_heads, self.head_size),
            starts.to(query.device, torch.int32),
            self.scale,
            False,
            -1,
            -1,
            0.0,
            None,
            None,
        )
        return output.view(query.shape)
