from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import npu_ops
from npu_ops.op import OPS


def layer(dtype, rows, n, k, *, bias=True):
    """Arguments of linear_silu_and_mul; those of linear_add_ behind a residual. Their product is ours in every tier."""
    x, weight = torch.randn(rows, k), (torch.randn(n, k) / math.sqrt(k)).to(dtype)
    torch.ops.npu_ops._choose_linear(weight, n, k, 0xFFFF, 0)
    return x.to(dtype), weight, torch.randn(n).to(dtype) if bias else None


def doubled(arguments):
    return tuple(None if tensor is None else tensor.cpu().double() for tensor in arguments)


def check(actual, expected, scale, k):
    """Rounded once: |error| <= half a unit of the result, and what a sum of k products in float32 loses of `scale`."""
    eps = torch.finfo(actual.dtype).eps
    allowed = eps / 2 * expected.abs() * 1.01 + (math.sqrt(k) + 16) * 2**-23 * scale
    # bfloat16 products on AVX-512 flush subnormal inputs
    allowed = allowed + (2**-24 if actual.dtype is torch.float16 else 1e-30)
    assert actual.shape == expected.shape
    assert ((actual.cpu().double() - expected).abs() <= allowed).all()


def check_gated(actual, arguments):
    x, weight, bias = doubled(arguments)
    expected = OPS["linear_silu_and_mul"].reference(x, weight, bias)
    sizes = x.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())
    gate, up = sizes.chunk(2, dim=-1)
    check(actual, expected, (1 + gate) * (1 + up), x.shape[-1])


def check_added(actual, residual, arguments):
    x, weight, bias = doubled(arguments)
    expected = residual.double() + F.linear(x, weight, bias)
    sizes = residual.double().abs() + x.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())
    check(actual, expected, sizes, x.shape[-1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 13, 19, 22, 33, 43, 45, 100, 300])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 100), (130, 257), (2, 1), (200, 1100)])
def test_gate_and_up(ops, isa, dtype, rows, n, k):
    arguments = layer(dtype, rows, n, k, bias=rows % 2 == 1)
    check_gated(ops.linear_silu_and_mul(*arguments), arguments)


@pytest.mark.parametrize("rows", [1, 4, 13, 19, 100, 300])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (33, 257), (1, 1), (200, 1100)])
def test_residual(ops, isa, dtype, rows, n, k):
    arguments, residual = layer(dtype, rows, n, k, bias=rows % 2 == 1), torch.randn(rows, n).to(dtype)
    result = residual.clone()
    assert ops.linear_add_(result, *arguments) is None
    check_added(result, residual, arguments)


@pytest.mark.parametrize("rows", [1, 9, 40, 150])
def test_on_each_device_and_in_a_graph(ops, device, dtype, rows):
    x, gate_up, bias = (tensor.to(device) for tensor in layer(dtype, rows, 96, 64))
    _, down, _ = (None if tensor is None else tensor.to(device) for tensor in layer(dtype, rows, 64, 48, bias=False))
    residual = torch.randn(rows, 64).to(dtype)
    result = residual.clone().to(device)

    def step():
        inner = ops.linear_silu_and_mul(x, gate_up, bias)
        ops.linear_add_(result, inner, down, None)
        return inner

    def check_step(inner):
        check_gated(inner, (x, gate_up, bias))
        check_added(result, residual, (inner, down, None))

    check_step(step())
    if device == "cpu":
        return
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        inner = step()
    x.copy_(torch.randn(rows, 64))
    result.copy_(residual)
    graph.replay()
    check_step(inner)


@pytest.mark.parametrize("rows", [2, 24])
def test_strided_rows_and_more_dimensions(ops, isa, dtype, rows):
    x, wide = torch.randn(rows, 3, 96).to(dtype)[..., 16:80], torch.randn(48, 200).to(dtype)[:, 100:164]
    ops._choose_linear(wide, 48, 64, 0xFFFF, 0)
    y = ops.linear_silu_and_mul(x, wide, None)
    assert y.shape == (rows, 3, 24)
    check_gated(y.flatten(0, 1), (x.flatten(0, 1), wide, None))
    memory = torch.randn(rows, 3, 60).to(dtype)
    before, residual = memory.clone(), memory[..., 7:55]
    ops.linear_add_(residual, x, wide, None)
    check_added(residual.flatten(0, 1), before[..., 7:55].flatten(0, 1), (x.flatten(0, 1), wide, None))
    assert torch.equal(memory[..., :7], before[..., :7])
    assert torch.equal(memory[..., 55:], before[..., 55:])


def test_the_product_of_torch(ops):
    """Where the measured choice is torch's product, the epilogues follow it."""
    arguments = layer(torch.float32, 5, 74, 51)
    residual = torch.randn(5, 74)
    for torchs in (0, 1):
        ops._choose_linear(arguments[1], 74, 51, 0xFFFF, 0xFFFF * torchs)
        check_gated(ops.linear_silu_and_mul(*arguments), arguments)
        result = residual.clone()
        ops.linear_add_(result, *arguments)
        check_added(result, residual, arguments)


def test_infinities_and_nothing(ops, isa):
    x, weight = torch.ones(3, 1), torch.tensor([[math.inf], [-math.inf], [math.nan], [1.0], [1.0], [1.0]])
    y = ops.linear_silu_and_mul(x, weight, None)
    assert torch.equal(y[:, 0], torch.full((3,), math.inf))
    assert y[:, 1:].isnan().all()  # as silu of minus infinity, which is minus infinity times zero
    assert ops.linear_silu_and_mul(x[:0], weight, None).shape == (0, 3)
    ops.linear_add_(torch.randn(0, 6), x[:0], weight, None)
    nothing = torch.ones(3, 6)
    ops.linear_add_(nothing, torch.randn(3, 0), torch.randn(6, 0), None)
    assert torch.equal(nothing, torch.ones(3, 6))


@pytest.mark.parametrize("name", ["silu_and_mul", "add"])
def test_batch_invariance(ops, isa, dtype, name):
    """Row i of a batch has, bit for bit, what it has alone."""
    x, weight, bias = layer(dtype, 41, 70, 1100)
    residual = torch.randn(41, 70).to(dtype)

    def run(rows):
        if name == "silu_and_mul":
            return ops.linear_silu_and_mul(x[rows], weight, bias)
        result = residual[rows].clone()
        ops.linear_add_(result, x[rows], weight, bias)
        return result

    npu_ops.native.set_batch_invariant(on=True)
    try:
        whole = run(slice(0, 41))
        for rows in (slice(0, 1), slice(0, 5), slice(0, 13), slice(0, 19), slice(40, 41)):
            assert torch.equal(run(rows), whole[rows])
    finally:
        npu_ops.native.set_batch_invariant(on=False)


def test_mismatches_are_refused(ops):
    x, weight, residual = torch.randn(2, 8), torch.randn(4, 8), torch.randn(2, 4)
    for match, arguments in {
        "as many of ups": (x, torch.randn(5, 8), None),
        "linear_silu_and_mul: weight": (x, torch.randn(4, 9), None),
        "linear_silu_and_mul: bias": (x, weight, torch.randn(2)),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            ops.linear_silu_and_mul(*arguments)
    for match, arguments in {
        "with 4 columns": (torch.randn(2, 5), x, weight, None),
        "dtype": (residual.bfloat16(), x, weight, None),
        "in place": (torch.randn(4, 2).t(), x, weight, None),
        "must not be x": (x, x, torch.randn(8, 8), None),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            ops.linear_add_(*arguments)
