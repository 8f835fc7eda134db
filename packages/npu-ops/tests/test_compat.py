"""What npu_ops.compat stands in for is still missing in vLLM; when one of these fails, its function can go."""

from __future__ import annotations

import inspect

import pytest

linear = pytest.importorskip("vllm.model_executor.kernels.linear")


@pytest.mark.parametrize("table", ["_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_WFP8A16_KERNELS"])
def test_vllm_registers_no_kernels_in_the_table(table: str) -> None:
    assert hasattr(linear, table)
    assert table not in inspect.getsource(linear.register_linear_kernel)
