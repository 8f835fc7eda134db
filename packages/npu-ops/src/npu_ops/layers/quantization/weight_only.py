"""Gives vLLM's weight-only layers of 4 and 8 bits (compressed-tensors, AWQ, GPTQ) their kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig, register_linear_kernel
from vllm.model_executor.parameter import ChannelQuantScaleParameter, PackedColumnParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from npu_ops import panels

if TYPE_CHECKING:
    from collections.abc import Callable

ops = torch.ops.npu_ops

# the value that stands for zero, where there are no zero points
_SYMMETRIC = {scalar_types.uint4b8: 8, scalar_types.uint8b128: 128}
_WITH_ZEROS = (scalar_types.uint4, scalar_types.uint8)
_UNPACKED = scalar_types.int4  # one value an octet: weights of 4 bits beside activations of 8


class SmallFloatsLinear:
    """What MXFP4, MXFP8 and NVFP4 have in common: `npu_ops::weight_only_linear` on a layer that has been repacked."""

    block: ClassVar[int]
    """Elements that share a scale."""
    outputs: int
    """Of the layer, set when it is repacked."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        bias = None if bias is None else bias.data
        return ops.weight_only_linear(x, layer.weight, layer.weight_scale, None, None, bias, self.outputs, self.block)


class NpuWeightOnlyLinearKernel(MPLinearKernel):
    """`npu_ops::weight_only_linear`; weights are repacked into panels when loaded, and kept only so."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Any: capabilities are CUDA's."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """4 and 8 bits, symmetric or with zero points, whole groups of a size that the kernel's blocks fit."""
        inputs, group = c.partition_weight_shape[0], c.group_size
        whole = group in (-1, inputs)
        if c.weight_type not in (_WITH_ZEROS if c.zero_points else (*_SYMMETRIC, _UNPACKED)):
            kind = "with" if c.zero_points else "without"
            return False, f"weights of type {c.weight_type} {kind} zero points: there are kernels for 4 and 8 bits"
        if c.weight_type != _UNPACKED and inputs % (pack := 32 // c.weight_type.size_bits):
            return False, f"{inputs} inputs are no multiple of {pack}, the values of an int32"
        if c.act_type not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"activations of {c.act_type}: weight-only kernels take bfloat16, float16 and float32"
        if not whole and (group < 4 or (128 % group and group % 128)):
            return False, f"groups of {group}: a divisor of 128 from 4 on, a multiple of 128, or -1 (whole channels)"
        if not whole and inputs % group:
            return False, f"{inputs} inputs are no whole number of groups of {group}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: w_q holds int32 along the inputs, [N, K / 8] or its transpose; zero points along the outputs.

        Of W4A8 it holds int8 [N, K], -8 to 7; activations stay as they are there, too.
        """
        bits = self.config.weight_type.size_bits
        w_q, w_s, w_z = self._get_weight_params(layer)
        outputs = self.config.partition_weight_shape[1]
        if self.config.weight_type == _UNPACKED:
            # vLLM's scheme has the same parameter under two names, which are two when weights are loaded again
            weight = (layer.weight.data + 8).view(torch.uint8)  # the checkpoint's name
            del layer.weight  # adapters ask whichever there is for its device
        else:
            weight = values_of(w_q.data if w_q.input_dim == 1 else w_q.data.t(), bits)
        order = getattr(layer, "g_idx", None)
        if order is not None:
            order = order.data.argsort(stable=True)
            weight = weight[:, order]
        scales = (w_s.data if w_s.output_dim == 0 else w_s.data.t())[:outputs]
        zeros = None
        if self.config.zero_points:
            assert w_z is not None
            zeros = values_of(w_z.data.t() if w_z.output_dim == 0 else w_z.data, bits).t()[:outputs]
            # GPTQ v1 has stored 0 less one, as 255 in 8 bits: the sum of 256 wraps back to it
            zeros = (zeros.short() + getattr(layer, "zero_offset", 0) - (128 if bits == 8 else 0)).to(torch.int8)
        if bits == 8:
            weight = weight.view(torch.int8) ^ -128  # value - 128
        replace_parameter(layer, self.w_q_name, panels.pack(weight, bits))
        replace_parameter(layer, self.w_s_name, panels.pack_groups(scales))
        if self.w_zp_name is not None:
            replace_parameter(layer, self.w_zp_name, None if zeros is None else panels.pack_groups(zeros))
        if order is not None:
            replace_parameter(layer, "g_idx", order.int())

    def npu_implementation(self) -> str:
        """Return the op, and the weights' format."""
        group = "channels" if self.config.group_size == -1 else f"groups of {self.config.group_size}"
        return f"npu_ops::weight_only_linear ({self.config.weight_type} in {group})"

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        w_q, w_s, w_z = self._get_weight_params(layer)
        inputs, outputs = self.config.partition_weight_shape
        group = inputs if self.config.group_size == -1 else self.config.group_size
        order, bias = getattr(layer, "g_idx", None), None if bias is None else bias.data
        return ops.weight_only_linear(x, w_q, w_s, w_z, order, bias, outputs, group)


def register_one_group(
    layer: nn.Module, outputs: int, pack: int, dtype: torch.dtype, load: Callable[..., None]
) -> None:
    """Register scales [1, N] and qzeros int32 [1, N / pack] of a group of all inputs, which every rank has whole."""
    scales, zeros = torch.empty(1, outputs, dtype=dtype), torch.empty(1, outputs // pack, dtype=torch.int32)
    loader = {"output_dim": 1, "weight_loader": load}
    layer.register_parameter("scales", ChannelQuantScaleParameter(data=scales, **loader))
    layer.register_parameter("qzeros", PackedColumnParameter(data=zeros, packed_dim=1, packed_factor=pack, **loader))


def values_of(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, columns], lowest bits first: uint8 [rows, columns * 32 / bits]."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


register_linear_kernel(NpuWeightOnlyLinearKernel, PlatformEnum.OOT, "mp")
