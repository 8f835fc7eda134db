"""Gives vLLM's activations the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import (
    GELU,
    FastGELU,
    GeluAndMul,
    GELUTanh,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
)

ops = torch.ops.npu_ops


@SiluAndMul.register_oot(name="SiluAndMul")
class NpuSiluAndMul(SiluAndMul):
    """SwiGLU's gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.silu_and_mul(x)


@GeluAndMul.register_oot(name="GeluAndMul")
class NpuGeluAndMul(GeluAndMul):
    """GeGLU's gate, by erf or tanh."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.gelu_and_mul(x, self.approximate == "tanh")


@GELU.register_oot(name="GELU")
class NpuGELU(GELU):
    """Gelu by erf."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return ops.gelu(x, False)


class _TanhGelu:
    """Three classes of vLLM that spell the same formula."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return ops.gelu(x, True)


@GELUTanh.register_oot(name="GELUTanh")
class NpuGELUTanh(_TanhGelu, GELUTanh):
    """Gelu by tanh."""


@NewGELU.register_oot(name="NewGELU")
class NpuNewGELU(_TanhGelu, NewGELU):
    """Gelu by tanh, GPT-2's spelling."""


@FastGELU.register_oot(name="FastGELU")
class NpuFastGELU(_TanhGelu, FastGELU):
    """Gelu by tanh, with a rounded constant."""


@QuickGELU.register_oot(name="QuickGELU")
class NpuQuickGELU(QuickGELU):
    """x * sigmoid(1.702 x)."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return ops.quick_gelu(x)


@ReLUSquaredActivation.register_oot(name="ReLUSquaredActivation")
class NpuReLUSquaredActivation(ReLUSquaredActivation):
    """relu(x)^2."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return ops.relu2(x)
