from __future__ import annotations

import copy
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_ops

REFERENCE = npu_ops.definitions.attention


class Batch:
    """A mixed batch over a paged cache whose blocks lie in random order, NaN where nothing was written."""

    def __init__(self, queries, lengths, heads=(4, 2), size=64, value_size=None, block_size=16, dtype=torch.float32):
        value_size = value_size or size
        blocks = -(-max([1, *lengths]) // block_size)
        self.dtype = dtype
        self.query = torch.randn(sum(queries), heads[0], size).to(dtype)
        kv = torch.randn(len(queries) * blocks, heads[1], block_size, size + value_size).to(dtype)
        self.table = torch.randperm(len(queries) * blocks).view(len(queries), blocks).int()
        for r, length in enumerate(lengths):
            for t in range(max(0, length), blocks * block_size):
                kv[self.table[r, t // block_size], :, t % block_size] = float("nan")
        self.key, self.value = kv[..., :size], kv[..., size:]
        self.starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.value_size = value_size

    def run(self, op, *options, device="cpu"):
        """The op's output on `device`, rows that it leaves alone being 7."""
        to = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
        out = torch.full((*self.query.shape[:2], self.value_size), 7.0, dtype=self.dtype, device=device)
        kv = [self.key, self.value] if device == "cpu" else [self.key.to(device), self.value.to(device)]
        op(out, to(self.query), *kv, to(self.table), to(self.starts), to(self.lengths), *map(to, options))
        return out.cpu()

    def compare(self, options, device="cpu"):
        actual = self.run(torch.ops.npu_ops.paged_attention, *options, device=device)
        exact = self.in_float32()
        expected = exact.run(REFERENCE.paged_attention.reference, *options)
        exact.value = exact.value.abs()
        check(actual, expected, exact.run(REFERENCE.paged_attention.reference, *options))

    def in_float32(self):
        """The same numbers, unrounded from here on."""
        exact = copy.copy(self)
        exact.dtype, exact.query = torch.float32, self.query.float()
        exact.key, exact.value = self.key.float(), self.value.float()
        return exact


def check(actual, expected, magnitude):
    """Within one rounding of the result and one of each softmax weight; magnitude: those weights' sums of |value|."""
    assert not actual.isnan().any()
    rounding = torch.finfo(actual.dtype).eps / 2 if actual.dtype is not torch.float32 else 0.0
    allowed = 2e-5 + 1.01 * rounding * (expected.abs() + magnitude)
    error = (actual.float() - expected).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} of what is allowed"


def options(scale=0.125, *, causal=True, left=-1, right=-1, cap=0.0, slopes=None, sinks=None):
    return scale, causal, left, right, cap, slopes, sinks


MIXED = ([1, 1, 5, 40, 130, 1, 0, 3], [1, 300, 5, 100, 130, 33, 9, 700])


@pytest.mark.parametrize("size", [8, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (6, 2)])
def test_head_sizes_and_groups(isa, dtype, size, heads):
    Batch([1, 20, 3], [50, 20, 40], heads, size, dtype=dtype).compare(options())


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 100])
def test_mixed_batch_in_blocks_of_any_size(isa, dtype, block_size):
    Batch(*MIXED, block_size=block_size, dtype=dtype).compare(options())


@pytest.mark.parametrize(
    "option",
    [
        options(causal=False),
        options(left=20),
        options(left=0),
        options(causal=False, left=9, right=4),
        options(causal=False, right=0),
        options(scale=1.0, cap=5.0),
        options(slopes=torch.rand(4)),
        options(sinks=torch.randn(4)),
        options(left=33, cap=30.0, slopes=torch.rand(4), sinks=torch.randn(4).bfloat16()),
    ],
    ids=["full", "window", "self", "band", "right", "cap", "alibi", "sinks", "all"],
)
def test_options(isa, dtype, option):
    Batch(*MIXED, dtype=dtype).compare(option)


MANY = ([1] * 40, [1 + 37 * i % 201 for i in range(40)])  # a thread takes several of them together


@pytest.mark.parametrize("option", [options(), options(left=20)], ids=["plain", "window"])
def test_many_short_sequences(isa, dtype, option):
    Batch(*MANY, size=128, dtype=dtype).compare(option)


@pytest.mark.parametrize("heads", [(17, 1), (40, 1), (71, 1), (100, 1)])
def test_more_grouped_heads_than_a_tile(isa, heads):
    Batch([1, 4], [70, 30], heads, 32).compare(options())


def test_values_of_another_size(isa, dtype):
    Batch([1, 30], [90, 60], size=96, value_size=64, dtype=dtype).compare(options())


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_latents(isa, dtype, heads):
    """The values are the first part of the keys, of one head for all queries, as in absorbed latent attention."""
    batch = Batch([1, 3, 1], [200, 40, 1], (heads, 1), 320, dtype=dtype)
    batch.value, batch.value_size = batch.key[..., :256], 256
    batch.compare(options(scale=0.05))


def test_on_each_device(device, dtype):
    Batch(*MIXED, dtype=dtype).compare(options(sinks=torch.randn(4)), device=device)


@pytest.mark.parametrize("heads", [2, 40])  # few rows, and enough for packed blocks
def test_long_sequences_are_split_and_merged(isa, heads):
    Batch([1, 1], [5000, 260], (heads, 1), 32).compare(options(sinks=torch.randn(heads)))


@pytest.mark.parametrize("option", [options(), options(scale=1.0), options(left=600)], ids=["soft", "sharp", "window"])
def test_many_queries_meet_several_blocks_of_keys(isa, dtype, option):
    """What is kept from block to block: peaks, which sharp logits raise, and sums."""
    Batch([70, 9], [1300, 1100], dtype=dtype).compare(option)


def test_padding_rows_are_left_alone(isa):
    batch = Batch([1, 1, 1], [30, 0, -1])
    out = batch.run(torch.ops.npu_ops.paged_attention, *options())
    assert (out[1:] == 7).all()
    assert (out[0] != 7).all()


def test_query_that_sees_nothing_gives_zeros(isa):
    batch = Batch([4], [4])
    out = batch.run(torch.ops.npu_ops.paged_attention, *options(causal=True, right=-1, left=-1))
    assert not out.isnan().any()
    empty = Batch([3], [2])  # the first query sits at position -1
    assert (empty.run(torch.ops.npu_ops.paged_attention, *options())[0] == 0).all()


@pytest.mark.parametrize("option", [options(), options(cap=5.0, sinks=torch.randn(4))], ids=["plain", "sinks"])
def test_logs_of_sums(isa, dtype, option):
    """Of the decode way, the flash way, and requests that are split over their keys; padding is left alone."""
    batch = Batch([1, 40, 130, 1, 2, 1], [1, 100, 130, 5000, 0, 300], dtype=dtype)
    found, expected = (torch.full((batch.query.shape[0], 4), 7.0) for _ in range(2))
    batch.run(torch.ops.npu_ops.paged_attention, *option, found)
    batch.run(REFERENCE.paged_attention.reference, *option, expected)
    torch.testing.assert_close(found, expected, atol=1e-4 if dtype is torch.float32 else 1e-2, rtol=0)


def test_parts_over_other_keys_are_joined_by_the_logs_of_their_sums(isa):
    """As ranks of context parallelism do, each of which holds some of the keys."""
    batch = Batch([3], [64], size=32, block_size=16)
    whole = batch.run(torch.ops.npu_ops.paged_attention, *options(causal=False))
    halves, logs, tables = [], [], batch.table.split(2, dim=1)
    for table in tables:
        batch.table, batch.lengths = table.contiguous(), torch.tensor([32], dtype=torch.int32)
        logs.append(torch.empty(3, 4))
        halves.append(batch.run(torch.ops.npu_ops.paged_attention, *options(causal=False), logs[-1]))
    weights = torch.stack(logs).softmax(0)[..., None]
    torch.testing.assert_close((torch.stack(halves) * weights).sum(0), whole, atol=1e-5, rtol=0)


def test_flat_query_and_output(isa):
    batch = Batch(*MIXED)
    expected = batch.run(REFERENCE.paged_attention.reference, *options())
    out = torch.zeros(batch.query.shape[0], 4 * 64)
    tensors = (batch.query.flatten(1), batch.key, batch.value, batch.table, batch.starts, batch.lengths)
    torch.ops.npu_ops.paged_attention(out, *tensors, *options())
    check(out.unflatten(-1, (4, 64)), torch.where(expected == 7, 0.0, expected), torch.zeros(()))


CODES = [torch.float8_e4m3fn, torch.int8]
SCALES = ["one", "head", "token"]


class CodedBatch(Batch):
    """The same with caches of codes; what the reference reads are the same codes."""

    def __init__(self, *args, code, scales, **kwargs):
        super().__init__(*args, **kwargs)
        blocks, heads, block_size = self.key.shape[:3]
        shape = {"one": (), "head": (heads,), "token": (blocks, heads, block_size)}[scales]
        self.scales = [torch.rand(shape) * 0.02 + 0.01 for _ in range(2)]
        if code == torch.int8:
            self.codes = [torch.randint(-127, 128, x.shape, dtype=code) for x in (self.key, self.value)]
        else:  # every code but that for NaN, subnormal ones too
            self.codes = [
                (torch.randint(0, 127, x.shape) | 128 * torch.randint(0, 2, x.shape)).byte().view(code)
                for x in (self.key, self.value)
            ]

    def run(self, op, *options, device="cpu"):
        to = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
        out = torch.full((*self.query.shape[:2], self.value_size), 7.0, dtype=self.dtype, device=device)
        tensors = (self.query, *self.codes, *self.scales, self.table, self.starts, self.lengths, *options)
        op(out, *map(to, tensors))
        return out.cpu()

    def compare(self, options, device="cpu"):
        actual = self.run(torch.ops.npu_ops.paged_attention_quantized, *options, device=device)
        exact = self.in_float32()
        expected = exact.run(REFERENCE.paged_attention_quantized.reference, *options)
        key, value = self.codes
        exact.codes = [
            key,
            value.abs() if value.dtype is torch.int8 else (value.view(torch.uint8) & 127).view(value.dtype),
        ]
        # scales by token are rounded with the weights
        check(actual, expected, 2 * exact.run(REFERENCE.paged_attention_quantized.reference, *options))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((5, 1), 128), ((8, 2), 40)])
def test_codes(isa, dtype, code, scales, heads, size):
    CodedBatch(*MIXED, heads=heads, size=size, dtype=dtype, code=code, scales=scales).compare(options(scale=0.02))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize("scales", SCALES)
def test_codes_of_many_short_sequences(isa, code, scales):
    CodedBatch(*MANY, size=128, dtype=torch.bfloat16, code=code, scales=scales).compare(options(scale=0.02))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize("scales", SCALES)
def test_many_queries_meet_several_blocks_of_codes(isa, code, scales):
    batch = CodedBatch([70, 9], [1300, 1100], dtype=torch.bfloat16, code=code, scales=scales)
    batch.compare(options(scale=0.02, left=900))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize("size", [128, 40])
def test_scales_between_the_codes(isa, code, size):
    """Where npu-platform keeps them: a token of a head is key, its scale, value, its scale."""
    batch = CodedBatch([1, 3, 1], [700, 64, 129], (4, 2), size, dtype=torch.bfloat16, code=code, scales="token")
    rows = [part.view(torch.uint8) for i in range(2) for part in (batch.codes[i], batch.scales[i][..., None])]
    row = torch.cat(rows, dim=-1)
    words = row.view(torch.float32)
    batch.codes = [row[..., :size].view(code), row[..., size + 4 : -4].view(code)]
    batch.scales = [words[..., size // 4], words[..., -1]]
    batch.compare(options(scale=0.02))


def exact_attention(batch, scale):
    """Of one query a request, in float64 from the codes."""
    keys, values = (c[:, 0].double() * s[:, 0, :, None] for c, s in zip(batch.codes, batch.scales, strict=True))
    out = []
    for r, length in enumerate(batch.lengths):
        key, value = (x[batch.table[r].long()].flatten(0, 1)[:length] for x in (keys, values))
        out.append((batch.query[r].double() @ key.T * scale).softmax(-1) @ value)
    return torch.stack(out)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [0.002, 0.02, 0.2], ids=["flat", "soft", "sharp"])
def test_sixteen_bit_integers_add_little_to_the_rounding_of_the_result(isa, narrow, scale):
    """Beside int8 codes, queries and weights are rounded to 16 bits: what that adds lies far below bf16's own rounding."""
    batch = CodedBatch([1, 1, 1], [900, 65, 300], (4, 1), 128, dtype=narrow, code=torch.int8, scales="token")
    exact = exact_attention(batch, scale)
    out = batch.run(torch.ops.npu_ops.paged_attention_quantized, *options(scale=scale)).double()
    rounding = (exact.to(narrow) - exact).square().mean().sqrt()
    bfloat16_rounding = (exact.bfloat16() - exact).square().mean().sqrt()
    assert (out - exact).square().mean() <= rounding**2 + (bfloat16_rounding / 16) ** 2


def test_float_queries_meet_codes_as_floats(isa):
    batch = CodedBatch([1, 1, 1], [900, 65, 300], (4, 1), 128, code=torch.int8, scales="token")
    out = batch.run(torch.ops.npu_ops.paged_attention_quantized, *options(scale=0.02))
    torch.testing.assert_close(out.double(), exact_attention(batch, 0.02), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize(("heads", "size"), [((1, 1), 32), ((3, 1), 72), ((7, 1), 112), ((8, 1), 256), ((12, 4), 96)])
def test_codes_of_other_heads(isa, code, heads, size):
    batch = CodedBatch(
        [1, 2, 1], [65, 20, 131], heads, size, block_size=7, dtype=torch.bfloat16, code=code, scales="head"
    )
    batch.compare(options(scale=0.02))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
@pytest.mark.parametrize(
    ("what", "value"),
    [("query", "nan"), ("query", "inf"), ("key scale", "nan"), ("value scale", "nan"), ("value scale", "inf")],
)
def test_codes_hide_no_nan(isa, code, what, value):
    batch = CodedBatch([1, 1], [70, 70], (2, 2), 32, code=code, scales="token")
    if what == "query":
        batch.query[0, 0, 3] = float(value)
    else:
        batch.scales[what == "value scale"][batch.table[0, 4], 0, 5] = float(value)
    out = batch.run(torch.ops.npu_ops.paged_attention_quantized, *options(scale=0.02))
    expected = batch.run(REFERENCE.paged_attention_quantized.reference, *options(scale=0.02))
    assert expected[0, 0].isnan().any() or expected[0, 0].isinf().any()
    assert not out[0, 0].isfinite().all()
    others = [(0, 1), (1, 0), (1, 1)]
    check(torch.stack([out[i] for i in others]), torch.stack([expected[i] for i in others]), torch.zeros(()))


@pytest.mark.parametrize("code", CODES, ids=["e4m3", "int8"])
def test_codes_with_all_options_on_each_device(device, code):
    option = options(scale=0.02, left=300, cap=30.0, slopes=torch.rand(4) / 8, sinks=torch.randn(4))
    CodedBatch([1, 40], [2000, 300], code=code, scales="token").compare(option, device=device)


def test_codes_of_tiny_queries_keep_their_precision(isa):
    batch = CodedBatch([1], [50], code=torch.float8_e4m3fn, scales="one")
    batch.query *= 1e-6
    batch.compare(options(scale=1e4))


def random_batch(seed, dtype, code):
    """Prompts from their beginning and after cached tokens, of any heads and sizes; logits from flat to sharp."""
    draw = random.Random(seed)
    queries = [draw.randint(9, 90), draw.randint(20, 150), draw.randint(1, 40)]
    lengths = [queries[0], queries[1] + draw.randint(0, 400), queries[2] + draw.randint(0, 200)]
    kv_heads, group, size = draw.randint(1, 2), draw.choice([1, 2, 3, 4, 7, 8]), draw.choice([32, 64, 80, 128])
    batch = (kv_heads * group, kv_heads), size, None, draw.choice([7, 16, 32])
    spread = draw.choice([0.1, 0.5, 1.0, 4.0])  # of the logits
    window = draw.choice([-1, -1, 100])
    if code is None:
        return Batch(queries, lengths, *batch, dtype), options(scale=spread / size**0.5, left=window)
    scales = draw.choice(["one", "head", "token"])
    made = CodedBatch(queries, lengths, *batch, dtype, code=code, scales=scales)
    return made, options(scale=spread / size**0.5, left=window)


def dense(batch, which, request, length):
    """Keys or values of a request in float64, [keys, query heads, size]."""
    cache = (batch.key, batch.value)[which].double()
    if isinstance(batch, CodedBatch):
        scale = batch.scales[which].double()
        cache = batch.codes[which].double() * (scale[..., None] if scale.dim() == 3 else scale.view(-1, 1, 1))
    rows = cache[batch.table[request].long()].transpose(1, 2).flatten(0, 1)[:length]
    return rows.repeat_interleave(batch.query.shape[1] // cache.shape[1], dim=1)


def attend(batch, scale, left, rounded=lambda weights: weights):
    """Causal attention in float64, the weights beside the highest `rounded`."""
    out = []
    for r, ((start, end), length) in enumerate(
        zip(pairwise(batch.starts.tolist()), batch.lengths.tolist(), strict=True)
    ):
        keys, values = (dense(batch, which, r, length) for which in range(2))
        logits = torch.einsum("qhd,khd->hqk", batch.query[start:end].double(), keys) * scale
        distance = torch.arange(length)[None] - torch.arange(length - (end - start), length)[:, None]
        hidden = (distance > 0) | (distance < -left if left >= 0 else distance > 0)
        logits = logits.masked_fill(hidden, float("-inf"))
        weights = rounded((logits - logits.amax(-1, keepdim=True)).exp())
        out.append(torch.einsum("hqk,khd->qhd", weights, values) / weights.sum(-1).T[..., None])
    return torch.cat(out)


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("code", [None, *CODES], ids=["plain", "e4m3", "int8"])
@pytest.mark.parametrize("seed", range(4))
def test_errors_of_random_prefills_are_those_of_rounding(isa, dtype, code, seed):
    """Of the weights and of the result to the narrow type: what else there is adds little.

    Scales by token are rounded with the weights and not with the sum that divides them, which adds a quarter.
    """
    batch, option = random_batch(seed, dtype, code)
    op = torch.ops.npu_ops.paged_attention if code is None else torch.ops.npu_ops.paged_attention_quantized
    exact = attend(batch, option[0], option[2])
    noisy = attend(batch, option[0], option[2], lambda weights: weights.to(dtype).double()).to(dtype).double()
    actual = batch.run(op, *option).double()
    assert rms(actual - exact) <= 1.4 * rms(noisy - exact)
    worst = (actual - exact).abs().max() / (noisy - exact).abs().max()
    assert worst <= 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_varlen(isa, device, dtype, causal, heads):
    lengths = [1, 40, 0, 130, 17]
    tokens = sum(lengths)
    q = torch.randn(tokens, heads[0], 80).to(dtype)
    kv = torch.randn(tokens, 2 * heads[1], 80).to(dtype)
    k, v = kv[:, : heads[1]], kv[:, heads[1] :]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    option = options(causal=causal, left=50)
    out = torch.zeros_like(q, device=device)
    moved = [x.to(device) for x in (q, kv, starts)]
    torch.ops.npu_ops.varlen_attention(
        out, moved[0], moved[1][:, : heads[1]], moved[1][:, heads[1] :], moved[2], *option
    )
    expected, magnitude = torch.zeros(2, *q.shape)
    REFERENCE.varlen_attention.reference(expected, q.float(), k.float(), v.float(), starts, *option)
    REFERENCE.varlen_attention.reference(magnitude, q.float(), k.float(), v.float().abs(), starts, *option)
    check(out.cpu(), expected, magnitude)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_block_table_and_lengths(data):
    draw = data.draw
    requests = draw(st.integers(1, 5))
    queries = [draw(st.integers(0, 40)) for _ in range(requests)]
    lengths = [q + draw(st.integers(0, 150)) for q in queries]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    batch = Batch(queries, lengths, (kv_heads * group, kv_heads), 16, block_size=draw(st.integers(1, 40)))
    batch.compare(options(causal=draw(st.booleans()), left=draw(st.integers(-1, 60)), right=draw(st.integers(-1, 20))))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: setattr(b, "lengths", b.lengths.long()), "int32"),
        (lambda b: setattr(b, "key", b.key.bfloat16()), "dtype"),
        (lambda b: setattr(b, "query", b.query[:, :3]), "divide"),
        (lambda b: setattr(b, "table", b.table[:2]), "row for each"),
        (lambda b: setattr(b, "value", b.value[1:]), "both caches must be"),
        (lambda b: setattr(b, "value", b.value[:, :, 1:]), "both caches must be"),
        (lambda b: setattr(b, "value", b.value[:, 1:]), "both caches must be"),
        (lambda b: (setattr(b, "key", b.key[:, :, :0]), setattr(b, "value", b.value[:, :, :0])), "at least one token"),
        (lambda b: (setattr(b, "key", b.key[:, :0]), setattr(b, "value", b.value[:, :0])), "there must be KV heads"),
    ],
)
def test_wrong_arguments_are_refused(change, match):
    batch = Batch([1, 1, 1], [5, 5, 5])
    change(batch)
    with pytest.raises(RuntimeError, match=match):
        batch.run(torch.ops.npu_ops.paged_attention, *options())


@pytest.mark.parametrize("name", ["output", "key", "value"])
def test_fewer_tokens_than_queries_are_refused(name):
    given = {"output": torch.zeros(4, 2, 8), "query": torch.randn(4, 2, 8)}
    given |= {"key": torch.randn(4, 1, 8), "value": torch.randn(4, 1, 8)}
    given[name] = given[name][:3]
    with pytest.raises(RuntimeError, match=f"{name} must have the query's 4 tokens, got 3"):
        torch.ops.npu_ops.varlen_attention(*given.values(), torch.tensor([0, 4]).int(), *options())


def test_no_query_heads(isa):
    batch = Batch([1, 3], [9, 3])
    batch.query = batch.query[:, :0]
    assert batch.run(torch.ops.npu_ops.paged_attention, *options()).shape == (4, 0, 64)


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 70, 1]], ids=["decode", "prefill"])
@pytest.mark.parametrize("code", [None, torch.int8])
def test_a_recorded_step_reads_nothing_outside_of_the_cache(isa, device, dtype, queries, code):
    """A replay cannot raise: a block that is none is block 0, a sequence ends with its table, a negative start skips."""
    lengths = [40, 80, 17]
    if code is None:
        op, batch = torch.ops.npu_ops.paged_attention, Batch(queries, lengths, dtype=dtype)
        for cache in (batch.key, batch.value):
            cache.nan_to_num_()
    else:
        op = torch.ops.npu_ops.paged_attention_quantized
        batch = CodedBatch(queries, lengths, dtype=dtype, code=code, scales="token")
    run = lambda: batch.run(op, *options(), device=device)  # noqa: E731
    batch.table[0, 1], batch.lengths[1], batch.table[2, 0] = 0, 80, 0
    expected = run()
    batch.table[0, 1], batch.lengths[1], batch.table[2, 0] = 10**8, 10**9, -7
    assert torch.equal(run(), expected)
    batch.starts[0] = -(10**8)
    actual = run()
    assert (actual[: queries[0]] == 7).all()
    assert torch.equal(actual[queries[0] :], expected[queries[0] :])
