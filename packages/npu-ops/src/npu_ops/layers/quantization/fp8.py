"""Gives vLLM's layers with 8-bit floating weights (fp8, compressed-tensors, online) their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops import native, panels
from npu_ops.compat import offer_fp8_kernels

ops = torch.ops.npu_ops

_READ_AS_ROWS = "kv_b_proj"  # vLLM's latent attention takes its weights apart after they were processed


class NpuFp8LinearKernel(FP8ScaledMMLinearKernel):
    """`npu_ops::fp8_linear`; weights stay rows or become panels, activations are rounded where the scheme says so.

    A dynamic scale of the whole batch becomes one by token, so that no request depends on its neighbours.
    """

    rounds_inputs = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Scales of the tensor, of channels, or of blocks that are multiples of 32 both ways."""
        group = c.weight_quant_key.scale.group_shape
        if c.weight_quant_key.dtype != torch.float8_e4m3fn:
            return False, f"weights of {c.weight_quant_key.dtype}: there are kernels for float8_e4m3fn"
        if group.row > 1 and group.col > 0 and (group.row % 32 or group.col % 32):
            return False, f"blocks of {group.row} x {group.col}: both must be multiples of 32"
        if c.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"results in {c.out_dtype}: there are kernels for bfloat16, float16 and float32"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Say which block of weights each scale is for; weights stay in vLLM's layout unless panels are read faster.

        Raises ValueError for NaN among the weights, and where the checkpoint has no scales.
        """
        shape = self.config.weight_quant_key.scale.group_shape
        self.is_block = shape.row > 1 and shape.col > 1
        weight = layer.weight.data if self.is_block else layer.weight.data.t()  # vLLM hands over [K, N]
        n, k = weight.shape
        if (weight.view(torch.uint8) & 127 == 127).any():
            msg = f"{getattr(layer, 'prefix', 'a layer')} has NaN among its fp8 weights: the checkpoint is damaged."
            raise ValueError(msg)
        if not weight.is_contiguous():
            weight = weight.contiguous()
            replace_parameter(layer, "weight", weight if self.is_block else weight.t())
        name = "weight_scale_inv" if getattr(layer, "weight_scale_inv", None) is not None else "weight_scale"
        scale = getattr(layer, name).data
        if (scale == torch.finfo(torch.float32).min).any():  # what vLLM fills scales with before it loads them
            msg = (
                f"{getattr(layer, 'prefix', 'a layer')} has no scale in the checkpoint ({name}): where it is not "
                "quantised, modules_to_not_convert of the quantization_config must have it by this name."
            )
            raise ValueError(msg)
        self.block = (shape.row, shape.col) if self.is_block else (1, k)
        if not self.is_block and scale.numel() == 1:
            self.block = (n, k)
        elif not self.is_block and scale.numel() != n:  # a scale for each shard
            scale = scale.flatten().repeat_interleave(torch.tensor(layer.logical_widths, device=scale.device))
        replace_parameter(layer, name, scale.float().contiguous())
        self.scale_name = name
        activations = self.config.activation_quant_key.scale
        self.group = 0
        if self.rounds_inputs:
            self.group = activations.group_shape.col if activations.group_shape.is_per_group() else k
        self.is_packed = self._packs(layer, n, k)
        if self.is_packed:
            replace_parameter(layer, "weight", panels.pack_bytes(weight))

    def _packs(self, layer: Any, n: int, k: int) -> bool:
        """Whether panels of n weight rows by k are read sooner, and by nobody but the kernel."""
        if not native.reads_fp8_panels() or self.config.out_dtype != torch.bfloat16:
            return False
        read_by_vllm = native.batch_invariant() and not self.is_block  # its layers dequantise them in that mode
        if read_by_vllm or getattr(layer, "prefix", "").endswith(_READ_AS_ROWS):
            return False
        return n % panels.COLUMNS == 0 and panels.fit_panels(self.block[1], k) and panels.fit_panels(self.group, k)

    def npu_implementation(self) -> str:
        """Return the op, the size of blocks, and whether activations are rounded."""
        rounded = "rounded" if self.group else "whole"
        return f"npu_ops::fp8_linear (blocks of {self.block[0]} x {self.block[1]}, {rounded} activations)"

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        x_scale = getattr(layer, "input_scale", None) if self.group else None
        weight = layer.weight if self.is_block or self.is_packed else layer.weight.t()
        scale = getattr(layer, self.scale_name)
        y = ops.fp8_linear(x, weight, scale, None if bias is None else bias.data, x_scale, self.group, *self.block)
        return y if y.dtype == self.config.out_dtype else y.to(self.config.out_dtype)

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        """Not called: apply_weights does it all."""
        raise NotImplementedError


class NpuFp8WeightOnlyLinearKernel(NpuFp8LinearKernel):
    """The same with activations as they are."""

    rounds_inputs = False


def _define_missing_ops() -> None:
    """Define vLLM's own ops that round weights to fp8, which its CPU and CUDA libraries bring and others lack."""

    def by_tensor(result: Tensor, values: Tensor, scale: Tensor, group_shape: tuple[int, int] | None = None) -> None:
        if scale.numel() != 1:
            msg = f"static_scaled_fp8_quant has one scale for all values here, got {tuple(scale.shape)}."
            raise ValueError(msg)
        limit = torch.finfo(result.dtype).max
        result.copy_((values.float() / scale.float()).clamp(-limit, limit))

    def by_row(result: Tensor, values: Tensor, scale: Tensor, scale_ub: Tensor | None = None) -> None:
        limit, wide = torch.finfo(result.dtype).max, values.float()
        highest = wide.abs().amax(-1, keepdim=True)
        highest = highest if scale_ub is None else highest.minimum(scale_ub)
        scale.copy_((highest / limit).clamp(min=1 / (limit * 512)))
        result.copy_((wide / scale).clamp(-limit, limit))

    for schema, function in (
        (
            "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None)",
            by_tensor,
        ),
        ("dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub)", by_row),
    ):
        name = schema.split("(")[0]
        if hasattr(torch.ops._C, name):
            continue
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(f"{schema} -> ()")
        library.impl(name, function, "CompositeExplicitAutograd")
        _kept.append(library)


_kept: list[torch.library.Library] = []
_define_missing_ops()
register_linear_kernel(NpuFp8LinearKernel, PlatformEnum.OOT, "fp8")
offer_fp8_kernels(block=NpuFp8LinearKernel, weight_only=NpuFp8WeightOnlyLinearKernel)
