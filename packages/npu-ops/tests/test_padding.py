"""Rows of padding: a graph's replay computes those of the tokens, of which there may be fewer than when it was captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

ROWS, WIDTH, HEADS, EXPERTS = 8, 64, 2, 4


@contextmanager
def counted(ops, tokens: Tensor, rows: int = ROWS):
    ops._count_tokens(tokens, rows)
    try:
        yield
    finally:
        ops._count_tokens(None, 0)


def linear(ops, x: Tensor) -> Tensor:
    return ops.linear(x, torch.full((WIDTH, WIDTH), 0.1, device=x.device), None)


def linear_of_bf16(ops, x: Tensor) -> Tensor:
    return ops.linear(x.bfloat16(), torch.full((WIDTH, WIDTH), 0.1, device=x.device).bfloat16(), None).float()


def norm(ops, x: Tensor) -> Tensor:
    return ops.rms_norm(x, torch.ones(WIDTH, device=x.device), 1e-6)


def gate(ops, x: Tensor) -> Tensor:
    return ops.silu_and_mul(x)


def rotation(ops, x: Tensor) -> Tensor:
    query, key = x.clone(), x.clone()
    positions = torch.arange(ROWS, device=x.device)
    angles = torch.linspace(-1, 1, ROWS * WIDTH // HEADS, device=x.device).view(ROWS, -1)
    ops.rotary_embedding(positions, query, key, WIDTH // HEADS, angles, True)
    return query + key


def experts(ops, x: Tensor) -> Tensor:
    weight, ids = ops.select_experts(x[:, :EXPERTS].contiguous(), 2, "softmax", True, 1.0, None, 0, 0)
    w13 = torch.full((EXPERTS, 64, WIDTH), 0.1, device=x.device)
    w2 = torch.full((EXPERTS, WIDTH, 32), 0.1, device=x.device)
    return ops.fused_experts(x, w13, w2, weight, ids, None, None, None, "silu", False, 1.0, 0.0, float("inf"), False)


def eight_bits(ops, x: Tensor) -> Tensor:
    codes, scale, _ = ops.dynamic_int8_quant(x, True)
    return codes.float() * scale


Op = Callable[..., Tensor]


@pytest.mark.parametrize("op", [linear, linear_of_bf16, norm, gate, rotation, experts, eight_bits])
def test_a_replay_computes_the_tokens(ops, npu, op: Op) -> None:
    moved, tokens = torch.rand(ROWS, WIDTH).to(npu), torch.tensor([ROWS], dtype=torch.int32, device=npu)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph), counted(ops, tokens):
        result = op(ops, moved)
    for count in (3, ROWS, 1):
        tokens.fill_(count)
        result.fill_(0)
        graph.replay()
        torch.testing.assert_close(result[:count], op(ops, moved)[:count])


@pytest.mark.parametrize("op", [linear, norm, gate, experts])
def test_it_leaves_padding_as_it_was(ops, npu, op: Op) -> None:
    """Or the test above would show nothing."""
    moved, tokens = torch.rand(ROWS, WIDTH).to(npu), torch.tensor([ROWS], dtype=torch.int32, device=npu)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph), counted(ops, tokens):
        result = op(ops, moved)
    tokens.fill_(3)
    result.fill_(7)
    graph.replay()
    assert (result[3:] == 7).all()
    assert not (result[:3] == 7).any()


def test_other_rows_are_computed(ops, npu) -> None:
    """Those of something else than the batch: as many as there are."""
    moved, tokens = torch.rand(ROWS + 1, WIDTH).to(npu), torch.tensor([3], dtype=torch.int32, device=npu)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph), counted(ops, tokens):
        result = norm(ops, moved)
    result.fill_(7)
    graph.replay()
    torch.testing.assert_close(result, norm(ops, moved))


@pytest.mark.parametrize("count", [0, -1, ROWS + 1])
def test_a_count_that_is_none_means_all_rows(ops, npu, count: int) -> None:
    moved, tokens = torch.rand(ROWS, WIDTH).to(npu), torch.tensor([count], dtype=torch.int32, device=npu)
    with counted(ops, tokens):
        result = norm(ops, moved)
    torch.testing.assert_close(result, norm(ops, moved))


def test_what_is_recorded_later_knows_of_none(ops, npu) -> None:
    moved, tokens = torch.rand(ROWS, WIDTH).to(npu), torch.tensor([3], dtype=torch.int32, device=npu)
    with counted(ops, tokens):
        pass
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = norm(ops, moved)
    result.fill_(7)
    graph.replay()
    torch.testing.assert_close(result, norm(ops, moved))


def test_bad_counts_are_refused(ops, npu) -> None:
    with pytest.raises(RuntimeError, match="one int32 on npu"):
        ops._count_tokens(torch.tensor([3], dtype=torch.int32), ROWS)
    with pytest.raises(RuntimeError, match="one int32 on npu"):
        ops._count_tokens(torch.zeros(2, dtype=torch.int32, device=npu), ROWS)
    with pytest.raises(RuntimeError, match="rows must be positive, not 0"):
        ops._count_tokens(torch.tensor([3], dtype=torch.int32, device=npu), 0)
