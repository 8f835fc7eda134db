"""What npu_ops.compat stands in for is still missing in vLLM; when one of these fails, its function can go."""

from __future__ import annotations

import inspect

import pytest

linear = pytest.importorskip("vllm.model_executor.kernels.linear")
compat = pytest.importorskip("npu_ops.compat")


def test_vllm_registers_no_kernels_in_the_table() -> None:
    assert hasattr(linear, "_POSSIBLE_WFP8A16_KERNELS")
    assert "_POSSIBLE_WFP8A16_KERNELS" not in inspect.getsource(linear.register_linear_kernel)


def test_kernels_are_offered_for_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own function where it takes the name "fp8_block", as that of vLLM 0.33 does."""
    tables = {name: {} for name in ("_POSSIBLE_FP8_BLOCK_KERNELS", "_POSSIBLE_WFP8A16_KERNELS")}
    for name, table in tables.items():
        monkeypatch.setattr(linear, name, table)
    compat.offer_fp8_kernels("block", "weight only")
    assert [list(table.values()) for table in tables.values()] == [[["block"]], [["weight only"]]]


def test_vllm_takes_one_class_for_a_layer_and_asserts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `layers_of_others` could go."""
    custom_op = pytest.importorskip("vllm.model_executor.custom_op")
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    layer = type("Layer", (custom_op.CustomOp,), {})
    layer.register_oot(layer, name="Layer")
    with pytest.raises(AssertionError, match="Duplicate op name"):
        layer.register_oot(type("Other", (layer,), {}), name="Layer")
