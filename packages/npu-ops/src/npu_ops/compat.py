"""Where vLLM has no seam for the kernels, which ``tests/test_compat.py`` watches, and where 0.32 and 0.33 differ."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

logger = logging.getLogger("vllm.npu_ops")


@contextlib.contextmanager
def layers_of_others() -> Iterator[None]:
    """Keep the classes that other plugins registered for vLLM's layers, whatever is registered for these meanwhile.

    Why: ``register_oot`` asserts that nobody has registered the name, so that the start would end there, and vLLM loads
    plugins in no order. Versions: vLLM 0.32 and 0.33. Scope: the process, once, when npu-ops registers.
    """
    theirs = dict(op_registry_oot)
    op_registry_oot.clear()
    try:
        yield
    finally:
        op_registry_oot.update(theirs)
    for name, layer in theirs.items():
        logger.info("npu-ops leaves %s to %s.%s", name, layer.__module__, layer.__qualname__)


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
