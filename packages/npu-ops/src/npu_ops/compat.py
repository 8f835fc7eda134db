"""Where vLLM has no seam for the kernels, which ``tests/test_compat.py`` watches, and where 0.32 and 0.33 differ."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum


def offer_fp8_kernels(
    block: type[linear.FP8ScaledMMLinearKernel], weight_only: type[linear.FP8ScaledMMLinearKernel]
) -> None:
    """Enter kernels for block scales, and for 8-bit weights beside 16-bit inputs, for out-of-tree platforms.

    Why: ``register_linear_kernel`` has no name for these two tables. Versions: vLLM 0.32; 0.33 has one for the first.
    Scope: the process, once, when npu-ops registers; entries of others stay.
    """
    try:
        linear.register_linear_kernel(block, PlatformEnum.OOT, "fp8_block")
    except ValueError:  # vLLM 0.32
        linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.OOT, []).append(block)
    linear._POSSIBLE_WFP8A16_KERNELS.setdefault(PlatformEnum.OOT, []).append(weight_only)


def without_requantization(method: Any) -> None:
    """Say in a method of experts, which are quantised while they load, that their weights come in no other format.

    Why: vLLM's constructors do, which ours leave out since they choose a kernel. Versions: vLLM 0.33; nothing of 0.32
    reads these. Scope: the method's own attributes.
    """
    method.requantization_source = None
    method.requantization_source_parameters = {}
