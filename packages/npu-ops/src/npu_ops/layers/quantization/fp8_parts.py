"""Refuses fp8 blocks that lie across the parts of a fused layer or across ranks: vLLM loads their scales to other rows.

Where a checkpoint's `quant_method` is fp8, vLLM 0.32 asks for whole blocks along the inputs, but not along the outputs
of layers that it fuses (`allow_fp8_block_shape_mismatch`), and then counts a part's blocks from its own first row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.parameter import BlockQuantScaleParameter

from npu_ops.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@register_weight_loader_v2_supported_method
class NpuFp8LinearMethod(Fp8LinearMethod):
    """Fp8LinearMethod, which loads scales of blocks where it finds the rows that they are for."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *sizes: Any, **more: Any
    ) -> None:
        """Register the base method's parameters; loading raises UnsupportedLayerError for blocks that are cut."""
        rows = self.weight_block_size[0] if self.block_quant else 1
        whole = output_partition_sizes if layer.tp_size > 1 else output_partition_sizes[:-1]
        if len(output_partition_sizes) > 1 and any(size % rows for size in whole):
            more["weight_loader"] = _refuse_scales(more["weight_loader"], layer, output_partition_sizes, rows)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **more)


def _refuse_scales(load: Callable[..., None], layer: Any, sizes: list[int], rows: int) -> Callable[..., None]:
    """Return a loader for all but scales of blocks; a matrix that is one in the checkpoint has its own on one rank."""

    def load_rest(param: Any, loaded_weight: Tensor, part: Any = None) -> None:
        if isinstance(param, BlockQuantScaleParameter) and (part is not None or layer.tp_size > 1):
            msg = (
                f"{layer.prefix} has parts of {', '.join(map(str, sizes))} rows on a rank, which are no whole blocks "
                f"of {rows} (weight_block_size), so that their scales cannot be told apart: choose a "
                "--tensor-parallel-size by which they are, or quantise by channel."
            )
            raise UnsupportedLayerError(msg)
        load(param, loaded_weight, *(() if part is None else (part,)))

    return load_rest
