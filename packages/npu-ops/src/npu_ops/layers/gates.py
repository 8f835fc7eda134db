"""Gives vLLM's gates with numbers of their own the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.activation import (
    XIELU,
    FatreluAndMul,
    GeluAndMulSparse,
    MulAndSilu,
    SiluAndMulWithClamp,
    SituAndMul,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)

from npu_ops.layers.layernorm import PROVIDER

ops = torch.ops.npu_ops


@MulAndSilu.register_oot(name="MulAndSilu")
class NpuMulAndSilu(MulAndSilu):
    """SwiGLU's gate, the gate in the second half."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.mul_and_silu(x)


@FatreluAndMul.register_oot(name="FatreluAndMul")
class NpuFatreluAndMul(FatreluAndMul):
    """MiniCPM-S's gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.fatrelu_and_mul(x, self.threshold)


@SituAndMul.register_oot(name="SituAndMul")
class NpuSituAndMul(SituAndMul):
    """Kimi's gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.situ_and_mul(x, self.beta, 0.0 if self.linear_beta is None else self.linear_beta)


@SiluAndMulWithClamp.register_oot(name="SiluAndMulWithClamp")
class NpuSiluAndMulWithClamp(SiluAndMulWithClamp):
    """SwiGLU's gate within limits."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.silu_and_mul_with_clamp(x, self.swiglu_limit, self.alpha, self.beta)


@SwigluOAIAndMul.register_oot(name="SwigluOAIAndMul")
class NpuSwigluOAIAndMul(SwigluOAIAndMul):
    """gpt-oss' gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.swigluoai_and_mul(x, self.alpha, self.limit)


@SwigluStepAndMul.register_oot(name="SwigluStepAndMul")
class NpuSwigluStepAndMul(SwigluStepAndMul):
    """Step-3's gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.swiglustep_and_mul(x, self.limit)


@GeluAndMulSparse.register_oot(name="GeluAndMulSparse")
class NpuGeluAndMulSparse(GeluAndMulSparse):
    """Gemma 3n's gate."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """x: [..., 2d]; returns [..., d]."""
        return ops.gelu_and_mul_sparse(x, self.std_multiplier, self.approximate == "tanh")


@XIELU.register_oot(name="XIELU")
class NpuXIELU(XIELU):
    """Apertus' activation."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return ops.xielu(x, self.alpha_p.data, self.alpha_n.data, self._beta_scalar, self._eps_scalar)


@ir.ops.gelu_and_mul_sparse.register_impl(PROVIDER, supported=True)
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """vLLM IR's gelu_and_mul_sparse."""
    return ops.gelu_and_mul_sparse(x, std_multiplier, approximate == "tanh")
