from __future__ import annotations

import math

import pytest
import torch

import npu_ops
from npu_ops.op import OPS

PLAIN = ("silu", False, 1.0, 0.0, math.inf, False)  # activation, interleaved, alpha, beta, limit, weigh_input


def layer(dtype, tokens, hidden, width, experts, top_k, *, gated=True, bias=False):
    """Arguments of fused_experts up to the biases, and no expert map."""
    rows = 2 * width if gated else width
    x, w13 = torch.randn(tokens, hidden), torch.randn(experts, rows, hidden) / math.sqrt(hidden)
    w2 = torch.randn(experts, hidden, width) / math.sqrt(width)
    weights, ids = torch.rand(tokens, experts).softmax(-1).topk(top_k, dim=-1)
    biases = [torch.randn(experts, n).to(dtype) if bias else None for n in (rows, hidden)]
    return [x.to(dtype), w13.to(dtype), w2.to(dtype), weights, ids.int(), *biases, None]


def check(actual, arguments):
    """Against float64; rounding of the activated rows may go the other way here and there."""
    x, w13, w2 = (tensor.double() for tensor in arguments[:3])
    biases = [None if bias is None else bias.double() for bias in arguments[5:7]]
    reference = OPS["fused_experts"].reference
    expected = reference(x, w13, w2, arguments[3], arguments[4], *biases, *arguments[7:])
    magnitude = reference(x, w13, w2.abs(), arguments[3], arguments[4], *biases, *arguments[7:]).abs() + 1
    assert actual.dtype == arguments[0].dtype
    eps = torch.finfo(actual.dtype).eps
    error = (actual.cpu().double() - expected.double()).abs()
    noise = 4 * eps + 2**-23 * (math.sqrt(x.shape[1]) + math.sqrt(w2.shape[2]) + 8)
    assert (error <= eps * expected.abs() + noise * magnitude).all(), error.max()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 48, 8, 2),
        (3, 130, 33, 4, 3),  # tails of rows and of columns
        (1, 1, 1, 1, 1),
        (40, 96, 40, 3, 2),  # many tokens an expert
        (30, 257, 100, 4, 1),  # some with many, some with few
        (110, 520, 20, 1, 1),  # more than one block of tokens, and of depth
        (11, 1601, 40, 1, 1),  # rows longer than what is multiplied in one go
        (14, 1061, 36, 1, 1),
        (16, 64, 64, 32, 8),
        (300, 1100, 70, 3, 2),  # hundreds of tokens an expert
        (100, 96, 33, 2, 1),
        (40, 17000, 8, 1, 1),  # rows so long that a cache holds few of them
    ],
)
def test_experts(ops, isa, dtype, shape):
    arguments = [*layer(dtype, *shape), *PLAIN]
    check(ops.fused_experts(*arguments), arguments)


@pytest.mark.parametrize("hidden", [64, 100, 131])
def test_every_number_of_tokens(ops, isa, hidden):
    """Whole strips of tokens, eight behind them or fewer, and more than meet a weight row at a time."""
    for tokens in (*range(1, 26), 31, 32, 33, 64, 65, 71, 72, 73, 80, 136):
        arguments = [*layer(torch.bfloat16, tokens, hidden, 37, 1, 1), *PLAIN]
        check(ops.fused_experts(*arguments), arguments)


@pytest.mark.parametrize("tokens", [2, 14, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("gate", "gated"),
    [
        (("silu", True, 1.702, 1.0, 0.6, False), True),  # gpt-oss
        (("silu", False, 1.0, 0.0, 0.6, False), True),
        (("silu", False, 1.0, 0.0, math.inf, True), True),  # Llama 4 weighs the input
        (("gelu", False, 1.0, 0.0, math.inf, False), True),
        (("gelu_tanh", False, 1.0, 0.0, math.inf, True), True),
        (("silu", False, 1.0, 0.0, math.inf, False), False),
        (("relu2", False, 1.0, 0.0, math.inf, False), False),
    ],
)
def test_activations_and_biases(ops, isa, tokens, dtype, gate, gated):
    arguments = [*layer(dtype, tokens, 72, 50, 3, 2, gated=gated, bias=True), *gate]
    check(ops.fused_experts(*arguments), arguments)


@pytest.mark.parametrize("tokens", [4, 50])
def test_whatever_the_routing(ops, isa, tokens):
    """All tokens on one expert, tokens on none, experts of other ranks, ids out of range, int64 ids."""
    arguments = [*layer(torch.bfloat16, tokens, 64, 32, 4, 2), *PLAIN]
    arguments[4].fill_(2)
    check(ops.fused_experts(*arguments), arguments)
    arguments[4][: tokens // 2] = torch.tensor([-1, 99])
    check(ops.fused_experts(*arguments), arguments)
    assert not ops.fused_experts(*arguments)[: tokens // 2].any()
    arguments[4] = torch.randint(0, 8, (tokens, 2))
    arguments[7] = torch.tensor([3, -1, 0, -1, 1, -1, 2, -1], dtype=torch.int32)
    check(ops.fused_experts(*arguments), arguments)


def test_ranks_add_up(ops):
    """Expert parallelism: each rank's experts by its map. Tensor parallelism: each rank's part of the width."""
    arguments = [*layer(torch.float32, 20, 64, 32, 4, 2), *PLAIN]
    x, w13, w2, weights, ids = arguments[:5]
    whole = ops.fused_experts(*arguments)
    maps = [torch.tensor(m, dtype=torch.int32) for m in ([0, 1, -1, -1], [-1, -1, 0, 1])]
    parts = [
        ops.fused_experts(x, w13[2 * r : 2 * r + 2], w2[2 * r : 2 * r + 2], weights, ids, None, None, maps[r], *PLAIN)
        for r in range(2)
    ]
    torch.testing.assert_close(sum(parts), whole)
    gate, up = w13.chunk(2, dim=1)
    halves = [torch.cat([gate[:, r::2], up[:, r::2]], dim=1) for r in range(2)]
    parts = [ops.fused_experts(x, halves[r], w2[..., r::2].contiguous(), *arguments[3:]) for r in range(2)]
    torch.testing.assert_close(sum(parts), whole)


def test_strided_rows_and_nothing(ops, isa):
    arguments = [*layer(torch.bfloat16, 6, 64, 32, 4, 2), *PLAIN]
    expected = ops.fused_experts(*arguments)
    wide = [torch.randn(6, 90), torch.randn(4, 64, 100), torch.randn(4, 64, 40)]
    for i, tensor in enumerate(wide):
        view = tensor.bfloat16()[..., 8 : 8 + arguments[i].shape[-1]]
        arguments[i] = view.copy_(arguments[i])
    assert torch.equal(ops.fused_experts(*arguments), expected)
    nothing = [arguments[0][:0], *arguments[1:3], arguments[3][:0], arguments[4][:0], *arguments[5:]]
    assert ops.fused_experts(*nothing).shape == (0, 64)


def test_a_token_is_the_same_in_any_company(ops, isa):
    """As long as no expert gets more tokens than the kernel multiplies row by row; see test_batch_invariance.py."""
    pairs = npu_ops.native.isa() in ("amx", "avx512_bf16")  # which go other ways from 5 tokens of bfloat16 on
    tokens = 4 if pairs else 12
    arguments = [*layer(torch.bfloat16, tokens, 128, 48, 4, 2), *PLAIN]
    together = ops.fused_experts(*arguments)
    for i in range(tokens):
        alone = [arguments[0][i : i + 1], *arguments[1:3], arguments[3][i : i + 1], arguments[4][i : i + 1]]
        assert torch.equal(ops.fused_experts(*alone, *arguments[5:]), together[i : i + 1])


@pytest.mark.parametrize("tokens", [3, 40])
def test_on_each_device_and_in_a_graph(ops, device, dtype, tokens):
    arguments = [*layer(dtype, tokens, 64, 48, 4, 2, bias=True), *PLAIN]
    logits = torch.randn(tokens, 4).to(dtype)
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments]
    moved_logits = logits.to(device)

    def step():
        moved[3], moved[4] = ops.select_experts(moved_logits, 2, "softmax", True, 1.0, None, 0, 0)
        return ops.fused_experts(*moved)

    def check_step(result):
        arguments[3], arguments[4] = OPS["select_experts"].reference(logits, 2, "softmax", True, 1.0, None, 0, 0)
        check(result, arguments)

    check_step(step())
    if device == "cpu":
        return
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = step()
    for seed in range(2):  # other tokens, other experts
        torch.manual_seed(seed)
        arguments[0].normal_()
        logits.normal_()
        moved[0].copy_(arguments[0])
        moved_logits.copy_(logits)
        graph.replay()
        check_step(result)


@pytest.mark.parametrize(
    "settings",
    [
        # top_k, scoring, renormalize, scale, with a bias, groups, top_groups
        (1, "softmax", False, 1.0, False, 0, 0),
        (4, "softmax", True, 1.0, False, 0, 0),
        (6, "softmax", False, 16.0, False, 8, 3),  # DeepSeek-V2
        (8, "sigmoid", True, 2.5, True, 8, 4),  # DeepSeek-V3
        (5, "sigmoid", False, 1.0, True, 0, 0),
        (4, "softmax", True, 1.0, True, 4, 1),
        (4, "sigmoid", True, 1.0, False, 32, 7),  # groups of one
    ],
)
def test_select_experts(ops, isa, dtype, settings):
    top_k, scoring, renormalize, scale, biased, groups, top_groups = settings
    bias = torch.randn(32).to(dtype) if biased else None
    for tokens, experts in ((1, 32), (70, 32)) if groups or biased else ((1, 32), (33, 130), (2, 7)):
        logits = torch.randn(tokens, 2 * experts).to(dtype)[:, :experts]
        arguments = (logits, top_k, scoring, renormalize, scale, bias, groups, top_groups)
        weights, ids = ops.select_experts(*arguments)
        expected_weights, expected_ids = OPS["select_experts"].reference(*arguments)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-7)


def test_of_equals_the_first_and_never_one_twice(ops, isa):
    _, ids = ops.select_experts(torch.zeros(2, 9), 4, "softmax", True, 1.0, None, 0, 0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    nan = torch.full((1, 9), math.nan)
    assert sorted(ops.select_experts(nan, 9, "sigmoid", True, 1.0, None, 3, 2)[1][0].tolist()) == list(range(9))


def refused():
    arguments = [*layer(torch.float32, 2, 8, 4, 3, 2), *PLAIN]

    def but(**changes):
        names = ("x", "w13", "w2", "weights", "ids", "bias13", "bias2", "expert_map", "activation")
        changed = list(arguments)
        for name, value in changes.items():
            changed[names.index(name)] = value
        return changed

    yield "width", but(w13=torch.randn(3, 9, 8))
    yield "hidden", but(x=torch.randn(2, 9))
    yield "dtype", but(w2=arguments[2].bfloat16())
    yield "float32", but(weights=arguments[3].double())
    yield "int32 or int64", but(ids=arguments[4].short())
    yield "bias13", but(bias13=torch.randn(3, 4))
    yield "activation", but(activation="tanh")
    yield "expert_map", but(expert_map=torch.zeros(3, dtype=torch.int64))


def test_mismatches_are_refused(ops):
    for match, arguments in refused():
        with pytest.raises(RuntimeError, match=match):
            ops.fused_experts(*arguments)
    for match, arguments in {
        "top_k": (torch.randn(2, 4), 5, "softmax", True, 1.0, None, 0, 0),
        "scoring": (torch.randn(2, 4), 2, "tanh", True, 1.0, None, 0, 0),
        "groups": (torch.randn(2, 4), 2, "softmax", True, 1.0, None, 3, 1),
        "bias": (torch.randn(2, 4), 2, "softmax", True, 1.0, torch.randn(3), 0, 0),
    }.items():
        with pytest.raises(RuntimeError, match=match):
            ops.select_experts(*arguments)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_a_nan_is_no_other_tokens(ops, isa, dtype, activation):
    x, w13, w2 = torch.ones(3, 16), torch.ones(1, 8, 16), torch.ones(1, 16, 8)
    x[1, 5] = math.nan
    routed = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32), None, None, None
    y = ops.fused_experts(*(t.to(dtype) for t in (x, w13, w2)), *routed, activation, False, 1.0, 0.0, math.inf, False)
    assert y.isnan().tolist() == [[False] * 16, [True] * 16, [False] * 16]
