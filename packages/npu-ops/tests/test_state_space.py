"""The ops that keep a state: against their references in float64, over dtypes, shapes, strides and kinds of requests."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from npu_ops.op import OPS

SLOTS = 6


def batch(kind):
    """Tokens, slots, starts and known of a step: decodes with padding, or prompts with and without a state."""
    if kind == "decodes":
        return 5, torch.tensor([[3, 9], [1, 9], [0, 9], [5, 9], [-1, 9]], dtype=torch.int32)[:, 0], None, None
    starts = torch.tensor([0, 7, 8, 8, 11], dtype=torch.int32)
    return 11, torch.tensor([2, 4, 1, 0], dtype=torch.int32), starts, torch.tensor([True, False, True, True])


def run(name, args, requests, device, written):
    """Run the kernel on `device`, and the reference in float64; return the pairs of what they return and write."""

    def moved(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    result = tuple(moved(x) for x in (*args, *requests))
    expected = tuple(wide(x).clone() if isinstance(x, torch.Tensor) else x for x in (*args, *requests))
    returned = (OPS[name](*result), OPS[name].reference(*expected))
    pairs = [(result[i].cpu(), expected[i]) for i in written]
    return pairs if returned[0] is None else [(returned[0].cpu(), returned[1]), *pairs]


def close(pairs, units=2.0):
    for actual, expected in pairs:
        eps = torch.finfo(actual.dtype).eps
        error = (actual.double() - expected).abs()
        scale = expected.abs().max()
        assert (error <= units * eps * expected.abs() + 4e-6 * (1 + scale)).all(), error.max()


@pytest.mark.parametrize("kind", ["decodes", "prompts"])
@pytest.mark.parametrize(("channels", "width"), [(8, 4), (45, 3), (130, 2), (16, 8)])
def test_causal_convolution(ops, isa, device, dtype, kind, channels, width):
    tokens, *requests = batch(kind)
    state = torch.randn(SLOTS, width - 1, channels).to(torch.float32 if channels == 45 else dtype)
    state = state.transpose(1, 2) if channels != 8 else state.transpose(1, 2).contiguous()
    x = torch.randn(tokens, channels + 9).to(dtype)[:, 4 : 4 + channels]
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
    before = state.clone()
    args = (x, weight, bias if width != 3 else None, state)
    pairs = run("causal_conv1d", args, (*requests, width != 2), device, [3])
    close(pairs)
    assert torch.equal(pairs[1][0][0], before[0])


@pytest.mark.parametrize("kind", ["decodes", "prompts"])
@pytest.mark.parametrize(("heads", "width", "groups", "size"), [(4, 16, 2, 32), (3, 21, 1, 13), (2, 64, 2, 128)])
def test_scan_of_mamba_2(ops, isa, device, dtype, kind, heads, width, groups, size):
    tokens, *requests = batch(kind)
    state = torch.randn(SLOTS, heads, width, size).to(torch.float32 if size == 32 else dtype)
    mixed = torch.randn(tokens, heads * width + 2 * groups * size).to(dtype)
    x, b, c = mixed.split([heads * width, groups * size, groups * size], dim=1)
    args = (
        torch.full((tokens, heads, width), 7.0, dtype=dtype),
        x.unflatten(1, (heads, width)),
        torch.randn(tokens, heads + 1).to(dtype)[:, :heads],
        -torch.rand(heads) * 2,
        b.unflatten(1, (groups, size)),
        c.unflatten(1, (groups, size)),
        torch.randn(heads) if size != 13 else None,
        torch.randn(heads).to(dtype),
        None if size == 32 else torch.randn(tokens, heads, width).to(dtype),
        state,
    )
    before = state.clone()
    pairs = run("selective_scan", args, requests, device, [0, 9])
    close(pairs)
    assert torch.equal(pairs[1][0][0], before[0])


@pytest.mark.parametrize("kind", ["decodes", "prompts"])
@pytest.mark.parametrize(("width", "size"), [(32, 16), (37, 5)])
def test_scan_of_mamba_1(ops, isa, device, dtype, kind, width, size):
    tokens, *requests = batch(kind)
    args = (
        torch.zeros(tokens, 1, width, dtype=dtype),
        torch.randn(tokens, 1, width).to(dtype),
        torch.randn(width, tokens).to(dtype).t().contiguous(),
        -torch.rand(width, size) * 3,
        torch.randn(tokens, 1, size).to(dtype),
        torch.randn(tokens, 1, size).to(dtype),
        torch.randn(width).to(dtype),
        torch.randn(width) * 10,  # softplus is the identity above 20
        torch.randn(tokens, 2 * width).to(dtype)[:, None, width:],
        torch.randn(SLOTS, width, size),
    )
    close(run("selective_scan", args, requests, device, [0, 9]))


@pytest.mark.parametrize("kind", ["decodes", "prompts"])
@pytest.mark.parametrize(
    ("heads", "keys", "value_size", "key_size"), [(4, 2, 16, 32), (3, 3, 21, 13), (2, 1, 128, 128)]
)
def test_gated_delta_rule(ops, isa, device, dtype, kind, heads, keys, value_size, key_size):
    tokens, *requests = batch(kind)
    args = (
        torch.full((tokens, heads, value_size), 7.0, dtype=dtype),
        torch.randn(tokens, 2 * keys * key_size + heads * value_size).to(dtype),
        torch.randn(tokens, heads + 3).to(dtype)[:, :heads],
        torch.randn(tokens, heads).to(dtype),
        torch.rand(heads),
        torch.randn(heads).to(dtype),
        torch.randn(SLOTS, heads, value_size, key_size).to(torch.float32 if key_size == 32 else dtype),
    )
    close(run("gated_delta_rule", args, requests, device, [0, 6]))


def test_a_prompt_in_chunks_and_token_by_token_is_the_same(ops):
    tokens, heads, width, size = 9, 2, 16, 8
    x, dt, b, c = (torch.randn(tokens, *s) for s in ((heads, width), (heads,), (1, size), (1, size)))
    a, slot = -torch.rand(heads), torch.tensor([1], dtype=torch.int32)

    def scan(*bounds):
        y, state = torch.zeros(tokens, heads, width), torch.full((2, heads, width, size), 5.0)
        for start, stop in itertools.pairwise(bounds):
            part = [v[start:stop] for v in (y, x, dt, b, c)]
            starts, known = torch.tensor([0, stop - start], dtype=torch.int32), torch.tensor([start > 0])
            ops.selective_scan(*part[:3], a, *part[3:], None, None, None, state, slot, starts, known)
        return y, state[1]

    whole, chunks, steps = scan(0, 9), scan(0, 4, 5, 9), scan(*range(10))
    for other in (chunks, steps):
        torch.testing.assert_close(other, whole)


@pytest.mark.npu_device
def test_a_graph_reads_the_requests_anew(ops, npu):
    x, weight, slots = torch.randn(3, 16).to(npu), torch.randn(16, 4).to(npu), torch.zeros(3, dtype=torch.int32)
    state, slots = torch.randn(SLOTS, 16, 3).to(npu), slots.to(npu)
    ops.causal_conv1d(x, weight, None, state, slots, None, None, True)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = ops.causal_conv1d(x, weight, None, state, slots, None, None, True)
    for values in ([4, 2, 0], [0, 5, 1]):
        slots.copy_(torch.tensor(values, dtype=torch.int32))
        expected_state = state.cpu()
        expected = OPS["causal_conv1d"].reference(
            x.cpu(), weight.cpu(), None, expected_state, slots.cpu(), None, None, True
        )
        graph.replay()
        torch.testing.assert_close((y.cpu(), state.cpu()), (expected, expected_state))


def steps(name, tokens):
    """Arguments of an op up to the state, which holds SLOTS; the state's place."""
    x, state = torch.randn(tokens, 4, 8), torch.randn(SLOTS, 4, 8, 16)
    if name == "causal_conv1d":
        return [torch.randn(tokens, 16), torch.randn(16, 4), None, torch.randn(SLOTS, 16, 3)], 3
    if name == "selective_scan":
        b, c = torch.randn(2, tokens, 2, 16)
        return [torch.zeros_like(x), x, torch.randn(tokens, 4), -torch.rand(4), b, c, None, None, None, state], 9
    gates = torch.randn(2, tokens, 4)
    return [torch.zeros_like(x), torch.randn(tokens, 96), *gates, torch.randn(4), torch.randn(4), state], 6


@pytest.mark.parametrize("name", ["causal_conv1d", "selective_scan", "gated_delta_rule"])
def test_what_is_no_slot_and_no_token_is_padding(ops, isa, device, name):
    """A replay cannot raise: a slot beyond the state is as slot 0, and tokens begin at the first."""
    args, place = steps(name, 5)
    tail = (None, True) if name == "causal_conv1d" else (None,)

    def run(slots, starts):
        mine = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in args]
        requests = (torch.tensor(values, dtype=torch.int32).to(device) for values in (slots, starts))
        returned = getattr(ops, name)(*mine, *requests, *tail)
        return (mine[0] if returned is None else returned).cpu(), mine[place].cpu()

    expected, actual = run([2, 0], [0, 3, 5]), run([2, 10**9], [-(10**9), 3, 10**9])
    assert all(map(torch.equal, actual, expected))
    assert not actual[0][3:].any()


def test_wrong_shapes_say_what_is_wanted(ops):
    with pytest.raises(RuntimeError, match="key size > 0"):
        args, place = steps("gated_delta_rule", 2)
        args[place] = args[place][..., :0]
        ops.gated_delta_rule(*args, torch.ones(2, dtype=torch.int32), None, None)
    x, slots = torch.randn(2, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="width must be 2 to 8"):
        ops.causal_conv1d(x, torch.randn(8, 1), None, torch.randn(2, 8, 0), slots, None, None, False)
    with pytest.raises(RuntimeError, match="each of the 1 requests has one token"):
        ops.causal_conv1d(x, torch.randn(8, 4), None, torch.randn(2, 8, 3), slots[:1], None, None, False)


def test_layers_say_that_they_serve_batch_invariant_mode():
    """To the V2 runner, by the name of vLLM's own backend, which says that it does not."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from npu_ops.layers.state_space import LayerWithKernels

    kinds = [MambaAttentionBackendEnum[name] for name in ("MAMBA1", "MAMBA2", "SHORT_CONV", "GDN_ATTN")]
    found = [LayerWithKernels.get_attn_backend(SimpleNamespace(mamba_type=kind)) for kind in kinds]
    for kind, backend in zip(kinds, found, strict=True):
        assert (backend.supports_batch_invariance(), kind.get_class().supports_batch_invariance()) == (True, False)
        assert backend.full_cls_name() == kind.get_class().full_cls_name()
        assert backend.get_name() == kind.get_class().get_name()
        assert backend is LayerWithKernels.get_attn_backend(SimpleNamespace(mamba_type=kind))
