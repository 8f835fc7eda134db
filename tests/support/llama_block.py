"""A decoder layer as Llama's, in plain PyTorch: what torch.compile is tested and measured on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaBlock(nn.Module):
    """Norm, attention with rotary embedding, norm, gated MLP, each with a residual.

    Args:
        width: size of the hidden states.
        heads: attention heads; each has width / heads elements, an even number.
        inner: size of the MLP.
    """

    def __init__(self, width: int = 64, heads: int = 4, inner: int = 96) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the block's output for ``x`` [batch, tokens, width] at ``positions`` [tokens]."""
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        attention = F.scaled_dot_product_attention(
            rotary(query, positions), rotary(key, positions), value, is_causal=True
        )
        x = x + self.out(attention.transpose(1, 2).reshape(batch, tokens, width))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Return ``x`` [..., tokens, even] turned by the angles of its positions."""
    size = x.shape[-1]
    frequencies = 10000 ** (-torch.arange(0, size, 2, device=x.device).float() / size)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
