"""Gives layers with MXFP4 weights (e2m1 in blocks of 32, scales e8m0; OCP Microscaling Formats 1.0) their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import (
    GptOssMxfp4Config,
    GptOssMxfp4MoEMethod,
    Mxfp4Config,
    Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from npu_ops import panels
from npu_ops.layers.quantization.experts import Integers, QuantizedExperts
from npu_ops.layers.quantization.weight_only import SmallFloatsLinear
from npu_ops.layers.quantization.without_settings import EveryDtype

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

BLOCK = 32
_NAN = 255  # of e8m0


class NpuMxfp4LinearKernel(SmallFloatsLinear, MxFp4LinearKernel):
    """`npu_ops::weight_only_linear`; activations stay as they are, as on every device without FP4 arithmetic."""

    block = BLOCK

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Everywhere: capabilities are CUDA's."""
        return True, None

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Activations that are not quantised, or that are to be where the hardware can."""
        if config.activation_quant_key in (None, kMxfp4Dynamic):
            return True, None
        return False, f"activations in {config.activation_quant_key}: there are kernels for 16-bit ones"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack: weight uint8 [N, K / 2], weight_scale uint8 [N, K / 32]."""
        integers = codes(layer.weight.data, layer.weight_scale.data)
        self.outputs = len(integers.values)
        replace_parameter(layer, "weight", panels.pack(integers.values, 4))
        replace_parameter(layer, "weight_scale", panels.pack_groups(integers.scales))

    def npu_implementation(self) -> str:
        """Return the op, and the weights' format."""
        return "npu_ops::weight_only_linear (mxfp4)"


def codes(packed: Tensor, scales: Tensor) -> Integers:
    """Two values an octet, the first in the lower half; raises ValueError for scales that are NaN."""
    scales = scales.view(torch.uint8)
    if (scales == _NAN).any():
        msg = "MXFP4 weights have NaN among their scales: the checkpoint is damaged."
        raise ValueError(msg)
    return Integers(panels.e2m1_codes(packed), scales.contiguous())


def e2m1_experts(method: QuantizedExperts, layer: Any, weight: str) -> None:
    """Pack w13_ and w2_ of the name `weight`, uint8 [E, rows, K / 2], and their weight_scale."""

    def of(name: str, expert: int) -> Integers:
        return codes(
            getattr(layer, f"{name}_{weight}").data[expert], getattr(layer, f"{name}_weight_scale").data[expert]
        )

    method.pack_integers(layer, 4, BLOCK, lambda e: of("w13", e), lambda e: of("w2", e))


class _Experts(QuantizedExperts):
    def begin(self, moe: FusedMoEConfig) -> None:
        super().begin(moe)
        self.max_capture_size = moe.max_capture_size

    @property
    def skip_forward_padding(self) -> bool:
        """False: nothing is padded."""
        return False

    @property
    def has_unpadded_output(self) -> bool:
        """False: nothing is padded."""
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """As they are: the kernels take any whole number of blocks."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack."""
        e2m1_experts(self, layer, "weight")


class NpuGptOssExperts(_Experts, GptOssMxfp4MoEMethod):
    """gpt-oss's experts on `npu_ops::weight_only_experts`."""

    interleaves = True

    def __init__(self, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_dtype = "gpt_oss_mxfp4"


class NpuMxfp4MoEMethod(_Experts, Mxfp4MoEMethod):
    """Other models' experts on `npu_ops::weight_only_experts`."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        """Raise UnsupportedLayerError for what has no kernel."""
        self.begin(moe)
        self.weight_dtype = "mxfp4"


@register_quantization_config("mxfp4")
class NpuMxfp4Config(EveryDtype, Mxfp4Config):
    """Mxfp4Config, whose experts take npu-ops' kernels."""

    def _make_moe_method(self, moe: FusedMoEConfig) -> NpuMxfp4MoEMethod:
        return NpuMxfp4MoEMethod(moe)


@register_quantization_config("gpt_oss_mxfp4")
class NpuGptOssMxfp4Config(EveryDtype, GptOssMxfp4Config):
    """GptOssMxfp4Config, whose experts take npu-ops' kernels."""

    def _make_moe_method(self, moe: FusedMoEConfig) -> NpuGptOssExperts:
        return NpuGptOssExperts(moe)


register_linear_kernel(NpuMxfp4LinearKernel, PlatformEnum.OOT, "mxfp4")
