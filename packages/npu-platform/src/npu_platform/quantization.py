"""Owns which quantised checkpoints are taken: those for whose layers somebody has registered a kernel with vLLM.

The device has no such kernels of its own; npu-ops registers some, a vendor's package may register others. Finer rules
(bits, group sizes) are the kernels': vLLM names them when it chooses one for a layer. Methods that a plugin has
registered beside vLLM's bring what computes their layers.
"""

from __future__ import annotations

from typing import get_args

from npu_platform.errors import UnsupportedFeatureError

__all__ = ["refuse_without_kernels"]

# vLLM's tables of linear kernels by platform
_WEIGHT_ONLY, _INT8, _FP8, _FP8_BLOCK, _MXFP4, _MXFP8, _NVFP4 = (
    "_POSSIBLE_KERNELS",
    "_POSSIBLE_INT8_KERNELS",
    "_POSSIBLE_FP8_KERNELS",
    "_POSSIBLE_FP8_BLOCK_KERNELS",
    "_POSSIBLE_MXFP4_KERNELS",
    "_POSSIBLE_MXFP8_KERNELS",
    "_POSSIBLE_NVFP4_KERNELS",
)
# Method, as vLLM names it -> the tables one of which must name a kernel for this platform.
TABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("auto_awq", "awq", "awq_marlin", "auto_gptq", "gptq", "gptq_marlin", "inc"), (_WEIGHT_ONLY,)),
    **dict.fromkeys(("compressed-tensors", "quark"), (_WEIGHT_ONLY, _INT8, _FP8, _MXFP4, _MXFP8, _NVFP4)),
    "fp8": (_FP8,),
    "fp8_per_tensor": (_FP8,),
    "fp8_per_channel": (_FP8,),
    "fp8_per_block": (_FP8_BLOCK,),
    "online": (_FP8, _FP8_BLOCK),
    **dict.fromkeys(("experts_int8", "int8_per_channel_weight_only", "npu_int8"), (_WEIGHT_ONLY,)),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), (_MXFP4,)),
    "modelopt": (_FP8,),
    "modelopt_fp4": (_NVFP4,),
    "modelopt_mxfp8": (_MXFP8,),
    "modelopt_mixed": (_FP8, _MXFP8, _NVFP4),
}


def refuse_without_kernels(method: str) -> None:
    """Raise UnsupportedFeatureError unless a kernel is registered that the method's layers can take."""
    from vllm.model_executor.layers.quantization import QuantizationMethods

    if method not in TABLES:
        if method not in get_args(QuantizationMethods):
            return
        known = ", ".join(sorted(TABLES))
        msg = f"the npu device has no kernels for {method} checkpoints: quantise with one of {known}, or not at all."
        raise UnsupportedFeatureError(msg)
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    if not any(getattr(linear, table).get(PlatformEnum.OOT) for table in TABLES[method]):
        msg = (
            f"the npu device has no kernels for {method} checkpoints: install npu-ops, which has some (and name "
            "npu_ops in VLLM_PLUGINS, if that is set), or serve an unquantised bf16 or fp16 checkpoint."
        )
        raise UnsupportedFeatureError(msg)
