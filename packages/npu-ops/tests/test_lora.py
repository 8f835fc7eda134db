from __future__ import annotations

import math

import pytest
import torch

from npu_ops.op import OPS


def stacks(dtype, adapters, rows, k):
    return [(torch.randn(adapters, 1, n, k) / math.sqrt(k)).to(dtype) for n in rows]


def routed(adapters, tokens):
    """Adapters in disorder, some without tokens, tokens without one; longer than the batch, as vLLM's buffers are."""
    return torch.randint(-1, adapters, (tokens + 3,))


def close(actual, expected, dtype, k):
    eps = torch.finfo(dtype).eps
    error = (actual.cpu().double() - expected.double()).abs()
    noise = 2**-23 * (math.sqrt(k) + 8)
    assert (error <= eps * expected.abs() + noise * (1 + expected.abs())).all(), error.max()


def check_shrink(ops, device, dtype, tokens, hidden, rank, adapters, slices, x=None):
    x = torch.randn(tokens, hidden).to(dtype) if x is None else x
    weights, indices = stacks(dtype, adapters, [rank] * slices, hidden), routed(adapters, tokens)
    y = torch.full((slices, tokens, rank), 7.0)
    expected = y.double()
    OPS["lora_shrink"].reference(expected, x.double(), [w.double() for w in weights], indices, 0.5)
    moved = y.to(device)
    ops.lora_shrink(moved, x.to(device), [w.to(device) for w in weights], indices.to(device), 0.5)
    close(moved, expected, torch.float32, hidden)


def check_expand(ops, device, dtype, tokens, rank, adapters, columns, *, add=True, margin=5):
    x, weights = torch.randn(len(columns), tokens, rank), stacks(dtype, adapters, columns, rank)
    indices, y = routed(adapters, tokens), torch.randn(tokens, sum(columns) + 2 * margin).to(dtype)
    expected = y.double()
    OPS["lora_expand"].reference(expected, x.double(), [w.double() for w in weights], indices, columns, margin, add)
    moved = y.to(device)
    ops.lora_expand(moved, x.to(device), [w.to(device) for w in weights], indices.to(device), columns, margin, add)
    close(moved, expected, dtype, rank)
    assert torch.equal(moved[:, :margin].cpu(), y[:, :margin])
    assert torch.equal(moved[:, -margin:].cpu(), y[:, -margin:])


@pytest.mark.parametrize("tokens", [1, 4, 50])
@pytest.mark.parametrize(("hidden", "rank", "adapters", "slices"), [(64, 16, 3, 3), (100, 8, 1, 1), (257, 33, 4, 2)])
def test_shrink(ops, isa, dtype, tokens, hidden, rank, adapters, slices):
    check_shrink(ops, "cpu", dtype, tokens, hidden, rank, adapters, slices)


@pytest.mark.parametrize("tokens", [1, 4, 50, 420])
@pytest.mark.parametrize(
    ("rank", "adapters", "columns"),
    [(16, 3, [64, 32, 32]), (8, 1, [200]), (33, 2, [7, 130]), (5, 3, [96, 40]), (8, 2, [128])],
)
def test_expand(ops, isa, dtype, tokens, rank, adapters, columns):
    check_expand(ops, "cpu", dtype, tokens, rank, adapters, columns, add=tokens != 4)


def test_on_each_device(ops, device, dtype):
    check_shrink(ops, device, dtype, 9, 64, 16, 3, 2)
    check_expand(ops, device, dtype, 9, 16, 3, [32, 16])


def test_strides_and_nothing(ops):
    check_shrink(ops, "cpu", torch.bfloat16, 6, 32, 8, 2, 1, x=torch.randn(6, 80).bfloat16()[:, 16:48])
    check_shrink(ops, "cpu", torch.bfloat16, 0, 32, 8, 2, 1)
    check_expand(ops, "cpu", torch.bfloat16, 0, 8, 2, [16])
    y, x = torch.randn(3, 8), torch.randn(1, 3, 4)
    before = y.clone()
    ops.lora_expand(y, x, [torch.randn(2, 1, 8, 4)], torch.full((3,), -1), [8], 0, True)
    assert torch.equal(y, before)


def test_narrower_weights_fill_the_first_columns(ops):
    y, x, weight = torch.zeros(2, 10), torch.randn(1, 2, 4), torch.randn(1, 1, 6, 4)
    ops.lora_expand(y, x, [weight], torch.zeros(2, dtype=torch.int64), [10], 0, True)
    torch.testing.assert_close(y, torch.nn.functional.pad(x[0] @ weight[0, 0].t(), (0, 4)))


@pytest.mark.npu_device
def test_a_graph_serves_every_batch_of_adapters(ops, npu):
    a, b = stacks(torch.float32, 3, [8], 32), stacks(torch.float32, 3, [40], 8)
    x, indices = torch.randn(5, 32), torch.tensor([0, 1, -1, 2, 1])
    moved_a, moved_b, moved_x, moved_indices = a[0].to(npu), b[0].to(npu), x.to(npu), indices.to(npu)
    y = torch.zeros(5, 40, device=npu)

    def step():
        product = torch.empty(1, 5, 8, device=npu)
        ops.lora_shrink(product, moved_x, [moved_a], moved_indices, 1.0)
        ops.lora_expand(y, product, [moved_b], moved_indices, [40], 0, False)

    step()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        step()
    for values in ([2, 2, 2, 2, 2], [-1, 0, 1, 0, -1]):
        indices.copy_(torch.tensor(values))
        moved_indices.copy_(indices)
        y.zero_()
        graph.replay()
        product, expected = torch.empty(1, 5, 8), torch.zeros(5, 40)
        OPS["lora_shrink"].reference(product, x, a, indices, 1.0)
        OPS["lora_expand"].reference(expected, product, b, indices, [40], 0, False)
        torch.testing.assert_close(y.cpu(), expected)


def test_mismatches_are_refused(ops):
    x, index = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    product, a, b = torch.empty(1, 3, 4), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 8, 4)
    for match, arguments in {
        "rank": (torch.empty(1, 3, 5), x, [a], index, 1.0),
        "stacks": (product, x, [b], index, 1.0),
        "dtype": (product, x, [a.bfloat16()], index, 1.0),
        "indices": (product, x, [a], index[:2], 1.0),
        "weights": (product, x, [], index, 1.0),
        "float32": (product.double(), x, [a], index, 1.0),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            ops.lora_shrink(*arguments)
    with pytest.raises(RuntimeError, match="outside"):
        ops.lora_expand(torch.zeros(3, 8), product, [b], index, [8], 4, True)
