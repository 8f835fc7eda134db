"""Gives layers with MXFP8 weights (e4m3 in blocks of 32, scales e8m0; OCP Microscaling Formats 1.0) their kernels.

Activations stay as they are, as on every device without arithmetic in this format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops import panels
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.weight_only import SmallFloatsLinear

BLOCK = 32
NAN = 255  # of e8m0


class NpuMxfp8LinearKernel(SmallFloatsLinear, Mxfp8LinearKernel):
    """`npu_ops::weight_only_linear` on codes and scales as the checkpoint has them."""

    block = BLOCK

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        """Matrices of whole blocks."""
        if c.bmm_batch_size is not None:
            return False, "batches of matrices in MXFP8 have no kernel"
        return c.weight_shape[1] % BLOCK == 0, f"{c.weight_shape[1]} inputs are no whole number of blocks of {BLOCK}"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: weight float8_e4m3fn [N, K], weight_scale uint8 [N, K / 32]. Raises ValueError for NaN."""
        codes, scales, *_ = integers(layer.weight.data, layer.weight_scale.data)
        self.outputs = len(codes)
        replace_parameter(layer, "weight", panels.pack(codes, 8))
        replace_parameter(layer, "weight_scale", panels.pack_groups(scales))

    def npu_implementation(self) -> str:
        """Return the op, and the weights' format."""
        return "npu_ops::weight_only_linear (mxfp8)"


def integers(weight: Tensor, scales: Tensor) -> Integers:
    """Return the codes and exponents of weights [N, K]; raises ValueError for NaN among them."""
    scales = scales.view(torch.uint8)
    if (scales == NAN).any() or (weight.view(torch.uint8) & 127 == 127).any():
        msg = (
            "MXFP8 weights have NaN among their values or scales: the checkpoint is damaged, or has no scale of a "
            "layer that is not quantised: the quantization_config must leave it out by the name that vLLM has for it."
        )
        raise ValueError(msg)
    return Integers(panels.e4m3_codes(weight), scales.contiguous())


class Mxfp8Experts(QuantizedExperts):
    """Experts in MXFP8 on `npu_ops::weight_only_experts`, activations as they are."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack w13_ and w2_: weight float8_e4m3fn [E, rows, K], weight_scale uint8 [E, rows, K / 32]."""

        def of(name: str, expert: int) -> Integers:
            pair = (getattr(layer, f"{name}_{part}").data[expert] for part in ("weight", "weight_scale"))
            return integers(*pair)

        self.pack_integers(layer, 8, BLOCK, lambda e: of("w13", e), lambda e: of("w2", e))


register_linear_kernel(NpuMxfp8LinearKernel, PlatformEnum.OOT, "mxfp8")
