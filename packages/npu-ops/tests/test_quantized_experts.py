"""Experts in quantised formats against the experts' own reference on what the same weights stand for."""

from __future__ import annotations

import math

import pytest
import torch

import npu_ops
from npu_ops import panels
from npu_ops.definitions.moe import experts_of
from npu_ops.op import OPS

PLAIN = ("silu", 1.0, 0.0, math.inf, False)  # activation, alpha, beta, limit, weigh_input
GPT_OSS = ("silu", 1.702, 1.0, 0.6, False)
PACKED = ["fp8-packed", "fp8-token-packed", "fp8-block-packed"]
FORMATS = [
    "int4",
    "int4-zeros",
    "int4-channel",
    "int8-weights",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "int8",
    "fp8",
    "fp8-token",
    "fp8-block",
    *PACKED,
]
ROUNDS_INPUTS = ("int8", "fp8-token", "fp8-block", "fp8-token-packed", "fp8-block-packed")


class Layer:
    """Random experts of a format: the op, its arguments, and the weights as floats."""

    def __init__(self, name, dtype, tokens, hidden, width, experts, top_k, *, gated=True, bias=False, gate=PLAIN):
        self.name, self.gate = name, gate
        self.parts = 2 if gated else 1
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.weights, ids = torch.rand(tokens, experts).softmax(-1).topk(top_k, dim=-1)
        self.ids = ids.int()
        sizes = (self.parts * width, hidden)
        self.biases = [torch.randn(experts, n).to(dtype) if bias else None for n in sizes]
        self.map = None
        made = [
            self.matrices(experts, n, k, parts) for n, k, parts in ((width, hidden, self.parts), (hidden, width, 1))
        ]
        self.tensors, self.exact = [t for m in made for t in m[0]], [m[1] for m in made]
        self.sizes = (width,)

    def matrices(self, experts, n, k, parts):
        """Tensors of one projection for the op, and [experts, parts * n, k] in float64."""
        if self.name.startswith("fp8"):
            return self.fp8_matrices(experts, n, k, parts)
        group = 1 << 20 if self.name in ("int4-channel", "int8") else 16 if self.name == "nvfp4" else 32
        groups, at = -(-k // group), torch.arange(k) // group
        eight = self.name in ("int8", "int8-weights")
        q = torch.randint(-128, 128, (experts, parts, n, k)).to(torch.int8)
        q = q if eight else q.view(torch.uint8) & 15
        scale = (torch.rand(experts, parts, n, groups) + 0.5).mul((0.02 if eight else 0.2) / math.sqrt(k))
        zero = torch.full((experts, parts, n, groups), 0 if eight else 8).to(torch.int8)
        if self.name == "mxfp8":
            weight = (torch.randn(experts, parts, n, k) * 20).to(torch.float8_e4m3fn)
            q, values, eight = panels.e4m3_codes(weight), weight.double(), True
        if self.name in ("mxfp4", "nvfp4"):
            values = torch.tensor([*panels.E2M1, *(-v for v in panels.E2M1)], dtype=torch.float64)[q.long()]
        if self.name == "nvfp4":
            scale = (torch.rand(scale.shape) * 400 + 20).to(torch.float8_e4m3fn)
            factors = (torch.rand(experts, parts, n) + 0.5) * 1e-3 / math.sqrt(k)
            exact = values * scale.double()[..., at] * factors.double()[..., None]
            q = panels.codes_of_e2m1(q)
        elif self.name in ("mxfp4", "mxfp8"):
            scale = torch.randint(118, 124, scale.shape).to(torch.uint8) - (4 if eight else 0)
            exact = values * torch.exp2(scale.double() - 127)[..., at]
            q = q if eight else panels.codes_of_e2m1(q)
        else:
            if self.name == "int4-zeros":
                zero = torch.randint(0, 16, zero.shape).to(torch.int8)
            scale = scale if self.name == "int8" else scale.bfloat16()
            exact = (q.double() - zero[..., at]) * scale.double()[..., at]
        exact = exact.flatten(1, 2)

        def packed(of, values):
            return torch.stack([torch.cat([of(part) for part in expert]) for expert in values])

        weight = packed(lambda part: panels.pack(part, 8 if eight else 4), q)
        if self.name == "int8":
            return (weight, packed(lambda s: torch.nn.functional.pad(s.flatten(), (0, -n % 32)), scale)), exact
        if self.name == "nvfp4":
            pairs = [list(zip(*of, strict=True)) for of in zip(scale, factors, strict=True)]
            return (weight, packed(lambda of: panels.pack_scaled_groups(*of), pairs), None), exact
        zeros = packed(panels.pack_groups, zero) if self.name == "int4-zeros" else None
        return (weight, packed(panels.pack_groups, scale), zeros), exact

    def fp8_matrices(self, experts, n, k, parts):
        """The same in fp8."""
        block_n, block_k = (32, 32) if self.name.startswith("fp8-block") else (1, 1 << 20)
        weight = (torch.randn(experts, parts, n, k) * 20).to(torch.float8_e4m3fn)
        scale = torch.rand(experts, parts, -(-n // block_n), -(-k // block_k)) * 0.004 / math.sqrt(k) + 1e-4
        at = torch.arange(n)[:, None] // block_n, torch.arange(k) // block_k
        rows = weight.flatten(1, 2)
        if self.name in PACKED:
            rows = torch.stack([torch.cat([panels.pack_bytes(part) for part in expert]) for expert in weight])
        return (rows, scale), (weight.double() * scale.double()[..., *at]).flatten(1, 2)

    @property
    def op(self):
        kind = "fp8" if self.name.startswith("fp8") else "int8" if self.name == "int8" else "weight_only"
        return OPS[f"{kind}_experts"]

    def arguments(self, device="cpu"):
        tensors = [*self.tensors, self.weights, self.ids, *self.biases, self.map]
        moved = [self.x.to(device), *(None if t is None else t.to(device) for t in tensors)]
        if self.name.startswith("fp8"):
            name = self.name.removesuffix("-packed")
            x_group = {"fp8": 0, "fp8-token": -1, "fp8-block": 32}[name]
            blocks = (32, 32) if name == "fp8-block" else (1, 1 << 20)
            return [*moved, None, None, x_group, *blocks, *self.gate]
        group = [] if self.name == "int8" else [{"int4-channel": 1 << 20, "nvfp4": 16}.get(self.name, 32)]
        return [*moved, *self.sizes, *group, *self.gate]

    def run(self, device="cpu"):
        return getattr(torch.ops.npu_ops, self.op.name)(*self.arguments(device))

    def check(self, actual):
        """Formats that round what they multiply: beside their own reference, where a tie may go the other way."""
        assert actual.dtype == self.x.dtype
        biases = [None if b is None else b.double() for b in self.biases]
        activation, *numbers, weigh_input = self.gate
        gate = (activation, False, *numbers, weigh_input)

        def exactly(down):
            up = self.exact[0].__getitem__
            rest = (self.weights, self.ids, *biases, self.map, gate)
            return experts_of(self.x.double(), len(self.exact[0]), up, down.__getitem__, *rest)

        eps, k = torch.finfo(actual.dtype).eps, self.x.shape[1] + self.sizes[0]
        magnitude = exactly(self.exact[1].abs()).abs() + 1
        expected, noise = exactly(self.exact[1]), 4 * eps + 2**-23 * (math.sqrt(k) + 8)
        if self.name in ROUNDS_INPUTS:
            expected, noise = (
                self.op.reference(*self.arguments()).double(),
                max(noise, 2**-6 if "fp8" in self.name else 2**-8),
            )
        error = (actual.cpu().double() - expected).abs()
        assert (error <= eps * expected.abs() + noise * magnitude).all(), (error / magnitude).max()
        assert (error / magnitude).mean() <= 4 * eps + 2**-14


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 64, 8, 2),
        (3, 160, 96, 4, 3),
        (40, 96, 32, 3, 2),  # many tokens an expert
        (30, 288, 224, 4, 1),  # some with many, some with few; more than one block of columns
    ],
)
def test_experts(isa, dtype, name, shape):
    layer = Layer(name, dtype, *shape)
    layer.check(layer.run())


@pytest.mark.parametrize("name", FORMATS)
def test_many_tokens_an_expert(isa, name):
    """So many that they go another way on AMX, weights of channels too; in one expert, and too few in another."""
    layer = Layer(name, torch.bfloat16, 150, 160, 96, 3, 1)
    layer.ids[:] = (torch.arange(150) >= 140).int()[:, None] + 1
    layer.check(layer.run())


@pytest.mark.parametrize("name", ["int4-channel", "int8", "fp8"])
@pytest.mark.parametrize("tokens", [2, 40])
def test_tails(isa, name, tokens):
    layer = Layer(name, torch.float32, tokens, 130, 33, 3, 2)
    layer.check(layer.run())


@pytest.mark.parametrize("name", ["int4", "mxfp4", "mxfp8", "int8", "fp8-block", "fp8-block-packed"])
@pytest.mark.parametrize(
    ("gate", "gated"),
    [
        (GPT_OSS, True),
        (("silu", 1.0, 0.0, math.inf, True), True),
        (("gelu_tanh", 1.0, 0.0, math.inf, False), True),
        (("relu2", 1.0, 0.0, math.inf, False), False),
    ],
)
def test_activations_and_biases(isa, name, gate, gated):
    layer = Layer(name, torch.float32, 20, 64, 96, 3, 2, gated=gated, bias=True, gate=gate)
    layer.check(layer.run())


@pytest.mark.parametrize("name", ["int4-zeros", "int8", "fp8", "fp8-token-packed"])
def test_whatever_the_routing(isa, name):
    """Experts of other ranks, ids out of range, tokens without experts, all on one, int64 ids, no tokens."""
    layer = Layer(name, torch.bfloat16, 30, 64, 32, 4, 2)
    layer.ids = torch.randint(0, 8, (30, 2))
    layer.ids[:10] = torch.tensor([-1, 99])
    layer.map = torch.tensor([3, -1, 0, -1, 1, -1, 2, -1], dtype=torch.int32)
    layer.check(layer.run())
    assert not layer.run()[:10].any()
    layer.ids.fill_(2)
    layer.check(layer.run())
    layer.x, layer.weights, layer.ids = layer.x[:0], layer.weights[:0], layer.ids[:0]
    assert layer.run().shape == (0, 64)


@pytest.mark.parametrize("name", FORMATS)
def test_on_each_device_and_in_a_graph(device, name):
    layer = Layer(name, torch.bfloat16, 14, 64, 64, 4, 2, bias=True)
    arguments = layer.arguments(device)
    step = lambda: getattr(torch.ops.npu_ops, layer.op.name)(*arguments)  # noqa: E731
    layer.check(step())
    if device == "cpu":
        layer.check(layer.op.reference(*arguments))
        return
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = step()
    layer.x.normal_()
    layer.ids = layer.ids.flip(0).contiguous()
    arguments[0].copy_(layer.x)
    at = next(
        i
        for i, a in enumerate(arguments)
        if isinstance(a, torch.Tensor) and a.shape == layer.ids.shape and a.dtype is torch.int32
    )
    arguments[at].copy_(layer.ids)
    graph.replay()
    layer.check(result)


@pytest.mark.parametrize("name", ["int4", "mxfp4", "int8"])
def test_a_token_is_the_same_in_any_company(isa, name):
    if isa in ("avx512_bf16", "amx") and name != "int8":
        pytest.skip("many rows of bfloat16 by scaled weights: only if that is asked for")
    check_company(Layer(name, torch.bfloat16, 1100, 64, 32, 2, 1))  # more than one part


@pytest.mark.parametrize("name", ["int4", "mxfp4", "mxfp8", "nvfp4", "fp8", "fp8-token", "fp8-block", *PACKED])
def test_a_token_is_the_same_in_any_company_if_that_is_asked_for(isa, name):
    layer = Layer(name, torch.bfloat16, 120, 1088, 32, 2, 1)
    npu_ops.native.set_batch_invariant(on=True)
    try:
        check_company(layer)
    finally:
        npu_ops.native.set_batch_invariant(on=False)


def check_company(layer):
    together = layer.run()
    x, weights, ids = layer.x, layer.weights, layer.ids
    for i in (0, len(x) // 2, len(x) - 1):
        layer.x, layer.weights, layer.ids = x[i : i + 1], weights[i : i + 1], ids[i : i + 1]
        assert torch.equal(layer.run(), together[i : i + 1])


def test_experts_without_elements_are_refused(ops):
    arguments = Layer("fp8", torch.float32, 2, 64, 32, 3, 2).arguments()
    for at in (1, 3):
        arguments[at] = arguments[at][:, :0] if at == 1 else arguments[at][..., :0]
    with pytest.raises(RuntimeError, match="must have elements"):
        ops.fp8_experts(*arguments)


def test_mismatches_are_refused(ops):
    for name, changes in {
        "int4": {1: "w13", 2: "scales", 12: "uint8", 13: "group_size"},
        "int8": {1: "uint8", 2: "float32"},
        "mxfp4": {13: "groups of MXFP4 have 32"},
        "fp8": {1: "float8_e4m3fn", 14: "blocks"},
    }.items():
        layer = Layer(name, torch.float32, 2, 64, 32, 3, 2)
        for at, match in changes.items():
            arguments = layer.arguments()
            wrong = arguments[at]
            other = 64 if name == "mxfp4" else 33
            arguments[at] = wrong[..., :1].contiguous() if isinstance(wrong, torch.Tensor) else other
            with pytest.raises(RuntimeError, match=match):
                getattr(ops, layer.op.name)(*arguments)
