"""Gives the patch embeddings of vision models, convolutions whose windows do not overlap, the kernel of `linear`."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.conv import Conv2dLayer, Conv3dLayer, ConvLayerBase

from npu_ops.layers.linear import plain_weight

ops = torch.ops.npu_ops


@Conv2dLayer.register_oot(name="Conv2dLayer")
class NpuConv2dLayer(Conv2dLayer):
    """Patches of an image; other convolutions stay with torch."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [batch, channels, height, width]; returns [batch, out channels, patches, patches]."""
        return embed_patches(self, x) if self.enable_linear else self._forward_conv(x)


@Conv3dLayer.register_oot(name="Conv3dLayer")
class NpuConv3dLayer(Conv3dLayer):
    """Patches of a video; other convolutions stay with torch."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [batch, channels, time, height, width]; returns [batch, out channels, patches, patches, patches]."""
        return embed_patches(self, x) if self.enable_linear else self._forward_conv(x)


def embed_patches(layer: ConvLayerBase, x: Tensor) -> Tensor:
    """Multiply each patch of x [batch, channels, *sizes] by the weight; returns [batch, out channels, *patches]."""
    dimensions, first = layer.num_dim, 2
    for dimension, size in enumerate(layer.kernel_size, start=first):
        x = x.unfold(dimension, size, size)
    patches = range(first, first + dimensions)
    rows = x.permute(0, *patches, 1, *(dimension + dimensions for dimension in patches))
    weight = plain_weight(layer).view(layer.out_channels, layer.input_size)
    out = ops.linear(rows.reshape(-1, layer.input_size), weight, layer.bias)
    return out.view(*rows.shape[: 1 + dimensions], -1).movedim(-1, 1)
