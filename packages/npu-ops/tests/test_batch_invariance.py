"""In batch-invariant mode row i of a batch has, bit for bit, what it has alone; without the mode these rows differ.

What it has is the truth, too: each result is also compared with float64 or with the op's reference.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import npu_ops
from npu_ops import panels
from npu_ops.config import OpsConfig
from npu_ops.errors import ConfigError
from npu_ops.op import OPS

ROWS = (2, 3, 5, 13, 19, 40)  # around every number of rows at which some kernel changes its way


@pytest.fixture(autouse=True)
def mode():
    npu_ops.native.set_batch_invariant(on=True)
    yield
    npu_ops.native.set_batch_invariant(on=False)


def check(op, rows, ways=ROWS):
    """op(rows [n, ...]) gives the first n's results whatever n, and each row's own."""
    whole = op(rows)
    for n in ways:
        assert torch.equal(op(rows[:n]), whole[:n]), n
    for i in (0, 7, len(rows) - 1):
        assert torch.equal(op(rows[i : i + 1]), whole[i : i + 1]), i
    return whole


def is_near(actual, expected, noise):
    """As the reference in float64: `noise` of the largest, and the rounding to the result's dtype."""
    eps, expected = torch.finfo(actual.dtype).eps, expected.double()
    error = (actual.double() - expected).abs()
    assert (error <= eps * expected.abs() + noise * (1 + expected.abs().max())).all(), error.max()


def test_the_environment_chooses_the_mode(monkeypatch):
    assert npu_ops.native.batch_invariant()
    for value, meaning in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert OpsConfig.from_environment().batch_invariant is meaning
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="must be 0 or 1, got 'yes'"):
        OpsConfig.from_environment()


@pytest.mark.parametrize(("n", "k"), [(70, 100), (37, 1500), (16, 2048)])
def test_linear(ops, equals_product, isa, dtype, n, k):
    x, weight, bias = torch.randn(41, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    equals_product(check(lambda rows: ops.linear(rows, weight, bias), x), x, weight, bias)


@pytest.mark.parametrize("k", [100, 1500])
def test_linear_of_many_rows(ops, equals_product, isa, k):
    """Around the numbers of rows at which tiles go another way: what meets a strip, once or twice, and copies."""
    x, weight = torch.randn(150, k).bfloat16(), torch.randn(70, k).bfloat16()
    equals_product(check(lambda rows: ops.linear(rows, weight, None), x, (16, 17, 48, 64, 65, 96, 128, 129)), x, weight)


def test_the_mode_is_needed(ops):
    """Or else nobody would want it off."""
    npu_ops.native.set_batch_invariant(on=False)
    x, weight = torch.randn(40, 1500), torch.randn(64, 1500)
    assert not torch.equal(ops.linear(x, weight, None)[:1], ops.linear(x[:1], weight, None))


def test_long_batches_in_parts(ops, equals_product):
    x, weight = torch.randn(2100, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    equals_product(check(lambda rows: ops.linear(rows, weight, None), x, (1000, 1025)), x, weight)


@pytest.mark.parametrize("block", [(None, None), (1, None), (32, 64)])
@pytest.mark.parametrize("group", [0, 128])
def test_fp8_linear(ops, equals_product, isa, dtype, block, group):
    """x has values of e4m3 up to the largest, so that where it is rounded it stays as it is."""
    n, k = 48, 1400
    rows, columns = (size or whole for size, whole in zip(block, (n, k), strict=True))
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // rows), -(-k // columns))
    x = (torch.randn(41, k) * 20).to(torch.float8_e4m3fn).to(dtype)
    x[:, ::128] = 448
    y = check(lambda x: ops.fp8_linear(x, weight, scale, None, None, group, rows, columns), x)
    equals_product(y, x, weight.double() * scale.double()[torch.arange(n)[:, None] // rows, torch.arange(k) // columns])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("block", [(1, None), (64, 128)])
@pytest.mark.parametrize("group", [0, 128, 640])
def test_fp8_linear_of_many_rows(ops, equals_product, isa, block, group, packed):
    """Around the numbers of rows at which tiles go another way, or would without the mode."""
    n, k = 96, 640
    rows, columns = (size or whole for size, whole in zip(block, (n, k), strict=True))
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // rows), -(-k // columns))
    x = (torch.randn(150, k) * 20).to(torch.float8_e4m3fn).bfloat16()
    x[:, ::128] = 448
    ways = (3, 4, 16, 17, 33, 48, 64, 65, 96, 97, 128, 129)
    of_op = panels.pack_bytes(weight) if packed else weight
    y = check(lambda x: ops.fp8_linear(x, of_op, scale, None, None, group, rows, columns), x, ways)
    equals_product(y, x, weight.double() * scale.double()[torch.arange(n)[:, None] // rows, torch.arange(k) // columns])


def test_integer_weights(ops, equals_product, isa, dtype):
    n, k, group = 64, 704, 64
    q, scale = torch.randint(0, 16, (n, k)), (torch.rand(n, k // group) * 0.01).to(dtype)
    zero, of = torch.randint(0, 16, (n, k // group)).to(torch.int8), torch.arange(k) // group
    weight, scales, zeros = panels.pack(q, 4), panels.pack_groups(scale), panels.pack_groups(zero)
    x = torch.randn(41, k).to(dtype)
    y = check(lambda x: ops.weight_only_linear(x, weight, scales, zeros, None, None, n, group), x)
    exact = (q.double() - zero[:, of]) * scale[:, of].double()
    largest = x.double().abs().view(41, -1, group).amax(-1)[:, of]
    equals_product(y, x, exact, more=largest @ exact.abs().t() * 2.0 ** (-30 if dtype is torch.float32 else -15))


def test_integer_activations(ops, equals_product, isa, dtype):
    n, k = 64, 704
    w, scale, x = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n), torch.randn(41, k).to(dtype)
    weight, sums = panels.pack(w, 8), w.int().sum(-1).int()

    def int8(x):
        codes, x_scale, zero = ops.dynamic_int8_quant(x, False)
        return ops.int8_linear(codes, x_scale, zero, weight, scale, sums, None, n, dtype)

    y = check(int8, x / 8)
    codes, x_scale, zero = ops.dynamic_int8_quant(x / 8, False)
    decoded = (codes.double() - zero) * x_scale.double()
    assert ((decoded - x.double() / 8).abs() <= 0.51 * x_scale).all()
    equals_product(y, decoded, w.double() * scale.double()[:, None])


@pytest.mark.parametrize("bias", [False, True])
def test_experts(ops, isa, dtype, bias):
    """All tokens choose among three experts, so that one has up to forty of them and alone has one."""
    hidden, width, experts, top_k = 1030, 50, 3, 2
    x = torch.randn(41, hidden).to(dtype)
    w13, w2 = (torch.randn(experts, n, k).to(dtype) / 32 for n, k in ((2 * width, hidden), (hidden, width)))
    biases = [torch.randn(experts, n).to(dtype) if bias else None for n in (2 * width, hidden)]
    router = torch.randn(experts, hidden).to(dtype)

    def route(x, select):
        return select(ops.linear(x, router, None), top_k, "softmax", True, 1.0, None, 0, 0)

    plain = (None, "silu", False, 1.0, 0.0, math.inf, False)
    y = check(lambda x: ops.fused_experts(x, w13, w2, *route(x, ops.select_experts), *biases, *plain), x)
    wide = [None if t is None else t.double() for t in (x, w13, w2, *biases)]
    routes = route(x, OPS["select_experts"].reference)
    expected = OPS["fused_experts"].reference(*wide[:3], *routes, *wide[3:], *plain)
    is_near(y, expected, 4 * torch.finfo(dtype).eps + 2**-23 * 48)  # activated rows are rounded, and the sums


def test_lora(ops, isa, dtype):
    hidden, rank, columns = 1100, 16, [64, 33]
    a = [torch.randn(2, 1, rank, hidden).to(dtype) / 32 for _ in columns]
    b = [torch.randn(2, 1, n, rank).to(dtype) for n in columns]
    indices = torch.arange(41) % 3 - 1

    def layer(rows, shrink=ops.lora_shrink, expand=ops.lora_expand, *, of=indices, a=a, b=b, wide=torch.float32):
        x, of = rows[:, 1:], of[rows[:, 0].long()]
        product, y = torch.empty(2, len(x), rank, dtype=wide), torch.zeros(len(x), sum(columns), dtype=rows.dtype)
        shrink(product, x, a, of, 0.5)
        expand(y, product, b, of, columns, 0, True)
        return y

    numbered = torch.cat((torch.arange(41)[:, None], torch.randn(41, hidden)), 1).to(dtype)
    y, truth = check(layer, numbered), [OPS[name].reference for name in ("lora_shrink", "lora_expand")]
    exact = {"a": [w.double() for w in a], "b": [w.double() for w in b], "wide": torch.float64}
    is_near(y, layer(numbered.double(), *truth, **exact), 2**-23 * 48)


class Cache:
    """One request's keys and values in blocks, beside those of others."""

    def __init__(self, dtype, length, heads, size, code=None, latent=0):
        self.heads, self.size, self.length, self.dtype, self.code = heads, size, length, dtype, code
        blocks = -(-length // 16)
        self.kv = torch.randn(2 * blocks, heads[1], 16, size if latent else 2 * size).to(dtype)
        self.values = slice(0, latent) if latent else slice(size, None)
        self.scales = ()
        if code is not None:
            self.kv = (torch.randn_like(self.kv, dtype=torch.float32) * 9).to(code)
            self.scales = tuple(torch.rand(2 * blocks, heads[1], 16) * 0.1 for _ in range(2))
        self.tables = torch.randperm(2 * blocks).view(2, blocks).int()
        self.query = torch.randn(length, heads[0], size).to(dtype)

    def attend(self, spans, options, ops=torch.ops.npu_ops, company=(30,)):
        """Queries [from, to) of the request as the given steps, the last beside others' of so many queries."""
        size, parts = self.size, []
        for number, (start, end) in enumerate(spans):
            others = company if number == len(spans) - 1 else ()
            query = torch.cat((self.query[start:end], *(self.query[:n] for n in others)))
            starts = torch.tensor([0, end - start, *others]).cumsum(0).int()
            tables, lengths = self.tables[[0, *(1 for _ in others)]], torch.tensor([end, *others]).int()
            cache = (self.kv[..., :size], self.kv[..., self.values], *self.scales)
            out = query.new_empty(*query.shape[:2], cache[1].shape[-1])
            op = ops.paged_attention if self.code is None else ops.paged_attention_quantized
            op(out, query, *cache, tables, starts, lengths, *options)
            parts.append(out[: end - start])
        return torch.cat(parts)


def check_cuts(cache, options):
    """At once, in chunks that end anywhere, and token by token at its end, as after a hit in the prefix cache."""
    length = cache.length
    whole = cache.attend([(0, length)], options)
    assert not whole.isnan().any()
    chunks = [(0, 1), (1, 70), (70, 71), (71, length - 3), *((i, i + 1) for i in range(length - 3, length))]
    assert torch.equal(cache.attend(chunks, options), whole)
    names = ("paged_attention", "paged_attention_quantized")
    references = SimpleNamespace(**{name: OPS[name].reference for name in names})
    equals_attention(whole, cache.attend([(0, length)], options, references))


def equals_attention(actual, expected):
    """Sums of softmax weights, which are rounded to bfloat16 or float16 where the values are that."""
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[actual.dtype]
    assert (actual.double() - expected.double()).abs().max() <= allowed * max(1, expected.abs().max() / 4)
    cosine = torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1)
    assert cosine.min() > (1 - 1e-9 if actual.dtype is torch.float32 else 0.9999)


@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (40, 2)])
@pytest.mark.parametrize("window", [-1, 50])
@pytest.mark.parametrize("code", [None, torch.int8, torch.float8_e4m3fn])
def test_attention_however_a_prompt_is_cut(isa, dtype, heads, window, code):
    cache = Cache(dtype, 150 if isa == "scalar" else 333, heads, 72, code)
    check_cuts(cache, (0.1, True, window, -1, 0.0, None, torch.randn(heads[0])))


@pytest.mark.parametrize("heads", [4, 16, 40])
def test_attention_to_latents_however_a_prompt_is_cut(isa, dtype, heads):
    cache = Cache(dtype, 100 if isa == "scalar" else 200, (heads, 1), 320, latent=256)
    check_cuts(cache, (0.1, True, -1, -1, 0.0, None, None))


@pytest.fixture
def one_thread():
    """So that tasks are as long as they become, on any machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_attention_without_a_cache(ops, isa, dtype, heads, causal):
    """Alone each sequence has the bits that it has beside others, before and behind it."""
    lengths = [9, 71, 300, 33, 170, 260]
    query = torch.randn(sum(lengths), heads[0], 40).to(dtype)
    key, value = (torch.randn(sum(lengths), heads[1], 40).to(dtype) for _ in range(2))
    options = (0.2, causal, -1, -1, 0.0, None, None)

    def attend(which, op=ops.varlen_attention):
        rows = [torch.cat([t.split(lengths)[i] for i in which]) for t in (query, key, value)]
        out = torch.empty_like(rows[0])
        op(out, *rows, torch.tensor([0, *(lengths[i] for i in which)]).cumsum(0).int(), *options)
        return out.split([lengths[i] for i in which])

    everyone = range(len(lengths))
    whole = attend(everyone)
    for i in everyone:
        assert torch.equal(attend([i])[0], whole[i]), lengths[i]
    for i, part in zip((4, 2, 1), attend([4, 2, 1]), strict=True):
        assert torch.equal(part, whole[i]), lengths[i]
    equals_attention(torch.cat(whole), torch.cat(attend(everyone, OPS["varlen_attention"].reference)))


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("code", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.usefixtures("one_thread")
def test_attention_over_a_cache_in_any_company(isa, dtype, queries, code):
    cache = Cache(dtype, 300, (6, 2), 40, code)
    spans, options = [(300 - queries, 300)], (0.1, True, -1, -1, 0.0, None, None)
    alone = cache.attend(spans, options, company=[])
    for company in ([1], [3, 1, 1, 1, 1], [250, 1, 200, 250]):
        assert torch.equal(cache.attend(spans, options, company=company), alone), company


@pytest.mark.parametrize("name", ["mamba-1", "mamba-2", "delta", "convolution"])
def test_states_however_a_prompt_is_cut(ops, isa, dtype, name):
    """Those of the recurrences in float32, as narrower ones are rounded at each cut."""
    tokens, heads, width, size = 75, 3, 24, 20

    def rows(*shape):
        return torch.randn(tokens, *shape).to(dtype)

    channels = 2 * size + heads * width
    a_by_channel, a, bias = -torch.rand(heads * width, size), -torch.rand(heads), torch.randn(heads).to(dtype)
    x, dt, b, c = rows(heads, width), rows(heads), rows(1, size), rows(1, size)
    whole = heads * width  # Mamba-1 has one head
    cases = {
        "mamba-1": (
            lambda ops, y, at, *of: ops.selective_scan(
                y[:, None], x[at].reshape(-1, 1, whole), dt_by_channel[at], a_by_channel, b[at], c[at], *[None] * 3, *of
            ),
            (whole,),
            (1, whole, size),
        ),
        "mamba-2": (
            lambda ops, y, at, *of: ops.selective_scan(y, x[at], dt[at], a, b[at], c[at], *[None] * 3, *of),
            (heads, width),
            (heads, width, size),
        ),
        "delta": (
            lambda ops, y, at, *of: ops.gated_delta_rule(y, qkv[at], dt[at], gate[at], a, bias, *of),
            (heads, width),
            (heads, width, size),
        ),
        "convolution": (
            lambda ops, y, at, *of: y.copy_(ops.causal_conv1d(qkv[at], taps, None, *of, True)),
            (channels,),
            (channels, 3),
        ),
    }
    dt_by_channel, qkv, gate, taps = rows(whole), rows(channels), rows(heads), torch.randn(channels, 4).to(dtype)
    op, shape, state_shape = cases[name]
    slot = torch.tensor([1], dtype=torch.int32)

    def run(*bounds, ops=ops):
        y = torch.zeros(tokens, *shape, dtype=dtype)
        state = torch.full((2, *state_shape), 5.0, dtype=dtype if name == "convolution" else torch.float32)
        for start, stop in itertools.pairwise(bounds):
            at = slice(start, stop)
            decode = start > 0 and stop == start + 1
            requests = (None, None) if decode else (torch.tensor([0, stop - start]).int(), torch.tensor([start > 0]))
            op(ops, y[at], at, state, slot, *requests)
        return y, state[1]

    expected = run(0, tokens)
    for bounds in ((0, 1, 2, 40, 41, tokens), range(tokens + 1)):
        assert all(map(torch.equal, run(*bounds), expected))
    families = ("selective_scan", "gated_delta_rule", "causal_conv1d")
    truth = run(0, tokens, ops=SimpleNamespace(**{family: OPS[family].reference for family in families}))
    for actual, reference in zip(expected, truth, strict=True):
        is_near(actual, reference, 4e-6)


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "top_k_top_p"])
def test_what_goes_row_by_row(ops, isa, name):
    x, weight = torch.randn(41, 20_000), torch.ones(20_000)
    calls = {
        "rms_norm": lambda ops, rows: ops.rms_norm(rows, weight, 1e-6),
        "silu_and_mul": lambda ops, rows: ops.silu_and_mul(rows),
        "top_k_top_p": lambda ops, rows: (
            y := rows.clone(),
            ops.top_k_top_p(y, None, torch.full((len(y),), 0.9)),
        )[0],
    }
    whole = check(lambda rows: calls[name](ops, rows), x)
    expected = calls[name](SimpleNamespace(**{name: OPS[name].reference}), x)
    torch.testing.assert_close(whole, expected, rtol=2e-6, atol=2e-6)
