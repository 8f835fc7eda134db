"""The place where vLLM has no seam for the kernels; ``tests/test_compat.py`` fails when it has one."""

from __future__ import annotations

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
