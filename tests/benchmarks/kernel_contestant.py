"""One contestant of the kernel benchmark: ``python -m tests.benchmarks.kernel_contestant npu|peer [bfloat16|float32]``.

Its own interpreter runs it. It reads ``case seconds figure`` a line and answers ``RESULT`` and the best or the median
sample in seconds a call, or the reason why the contestant does not run the case. What a case needs is prepared once and
kept until the next case comes.
Weights and caches are rotated over several copies, so that they come from memory as in a model.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from tests.benchmarks.kernel_cases import CASES, VOCABULARY

Call = Callable[[], object]
COLD = 256 << 20  # bytes of copies that no cache holds
BLOCK = 128
MIN_SAMPLE = 5e-4  # seconds
# With one thread its own time, which a busy machine does not lengthen.
clock = time.thread_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter


def main(who: str, dtype: str = "bfloat16") -> None:
    """Answer until the parent hangs up."""
    torch.manual_seed(0)
    contestant = {"npu": Npu, "peer": Peer}[who]()
    contestant.dtype = getattr(torch, dtype)
    cases = {case.name: case for case in CASES}
    current, calls = "", []
    for line in sys.stdin:
        name, seconds, figure = line.split()
        if name != current:
            current, calls = name, []
            contestant.forget()
            try:
                calls = getattr(contestant, cases[name].kernel)(**cases[name].numbers)
                for call in calls[:2]:
                    call()
            except (AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
                reply(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                current = ""
                continue
        reply({"best": min, "median": statistics.median}[figure](samples_of(calls, float(seconds))))


def reply(answer: float | str) -> None:
    """Tell the parent."""
    print("RESULT " + json.dumps(answer), flush=True)


def samples_of(calls: list[Call], seconds: float) -> list[float]:
    """Return seconds a call: some samples, at least three, each of enough calls for the clock."""
    turn = cycle(calls)
    began = clock()
    next(turn)()
    many = max(1, int(MIN_SAMPLE / max(1e-7, clock() - began)))
    samples: list[float] = []
    until = clock() + seconds
    while len(samples) < 3 or clock() < until:
        began = clock()
        for _ in range(many):
            next(turn)()
        samples.append((clock() - began) / many)
        if len(samples) >= 2 and samples[-1] > 20 * seconds:
            break
    return samples


def copies(bytes_each: int, most: int = 64) -> int:
    """Return how many copies of something no cache holds."""
    return max(1, min(most, -(-COLD // bytes_each)))


class Contestant:
    """The tensors of every case; subclasses say where they live and which kernel reads them."""

    device = "cpu"
    dtype = torch.bfloat16  # of activations, weights and caches

    def forget(self) -> None:
        """Give back what the allocator keeps of the case before: several contestants share the memory."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Small random numbers on the contestant's device."""
        return (torch.randn(*shape) * 0.05).to(dtype or self.dtype).to(self.device)

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        """A tensor of `values` on the contestant's device."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    def batch(self, batch: int, queries: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """Block table (blocks in random order), query_start_loc and seq_lens."""
        blocks = -(-context // BLOCK)
        table = torch.randperm(batch * blocks).view(batch, blocks)
        starts = torch.arange(batch + 1) * queries
        lengths = torch.full((batch,), context)
        return tuple(self.tensor(x, torch.int32) for x in (table, starts, lengths))  # type: ignore[return-value]

    def weights(self, *shape: int) -> Tensor:
        """Small random numbers of many, without a wider copy of them."""
        return torch.empty(shape, dtype=self.dtype).uniform_(-0.05, 0.05).to(self.device)

    def choices(self, experts: int, top_k: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Weights and experts of the tokens, for several calls; every contestant gets the same."""
        generator = torch.Generator().manual_seed(0)
        pairs = [torch.rand(tokens, experts, generator=generator).topk(top_k, dim=-1) for _ in range(8)]
        return [(self.tensor(weight, torch.float32), self.tensor(ids, torch.int32)) for weight, ids in pairs]

    def adapters(
        self, adapters: int, tokens: int, hidden: int, rank: int, size: int, heads: int, kv_heads: int
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[int], Tensor]:
        """x, the stacks of A and of B for queries, keys and values, their columns, and each token's adapter."""
        columns = [heads * size, kv_heads * size, kv_heads * size]
        a = [self.random(adapters, 1, rank, hidden) for _ in columns]
        b = [self.random(adapters, 1, n, rank) for n in columns]
        return self.random(tokens, hidden), a, b, columns, self.tensor(torch.arange(tokens) % adapters, torch.int64)


class Npu(Contestant):
    """npu-ops on npu tensors, as vLLM calls it."""

    device = "npu"

    def __init__(self) -> None:
        """Load the kernels."""
        import npu_ops  # noqa: F401

        self.ops = torch.ops.npu_ops

    def forget(self) -> None:
        """Empty the device's cache."""
        torch.npu.empty_cache()  # type: ignore[attr-defined]

    def linear(self, m: int, n: int, k: int) -> list[Call]:
        """Weights as the checkpoint stores them."""
        x = self.random(m, k)
        one = self.random(n, k)
        weights = [one, *(one.clone() for _ in range(copies(2 * n * k) - 1))]
        return [lambda w=w: self.ops.linear(x, w, None) for w in weights]

    def decode(
        self, heads: int, kv_heads: int, size: int, batch: int, queries: int, context: int, cache: str
    ) -> list[Call]:
        """Blocks of keys and values side by side."""
        table, starts, lengths = self.batch(batch, queries, context)
        query = self.random(batch * queries, heads, size)
        output = torch.empty_like(query)
        options = (size**-0.5, True, -1, -1, 0.0, None, None)
        shape = (table.numel(), kv_heads, BLOCK, 2 * size)
        if cache == "auto":
            one, op, scales = self.random(*shape), self.ops.paged_attention, ()
        else:
            code = torch.int8 if cache.startswith("int8") else torch.float8_e4m3fn
            one = torch.randint(0, 60, shape, dtype=torch.int8).to(self.device).view(code)
            op = self.ops.paged_attention_quantized
            each = shape[:3] if cache.endswith("per_token_head") else ()
            scales = tuple(torch.full(each, 0.01).to(self.device) for _ in range(2))
        caches = [one, *(one.clone() for _ in range(copies(one.numel() * one.element_size()) - 1))]

        def call(kv: Tensor) -> None:
            op(output, query, kv[..., :size], kv[..., size:], *scales, table, starts, lengths, *options)

        return [lambda kv=kv: call(kv) for kv in caches]

    prefill = decode

    def experts(self, hidden: int, width: int, experts: int, top_k: int, tokens: int) -> list[Call]:
        """Weights as vLLM has loaded them."""
        x, w13, w2 = (
            self.random(tokens, hidden),
            self.weights(experts, 2 * width, hidden),
            self.weights(experts, hidden, width),
        )
        plain = (None, None, None, "silu", False, 1.0, 0.0, float("inf"), False)
        return [
            lambda c=c: self.ops.fused_experts(x, w13, w2, *c, *plain) for c in self.choices(experts, top_k, tokens)
        ]

    def lora(self, **numbers: int) -> list[Call]:
        """Both products."""
        x, a, b, columns, indices = self.adapters(**numbers)
        y, product = self.random(len(x), sum(columns)), torch.empty(3, len(x), numbers["rank"], device=self.device)

        def call() -> None:
            self.ops.lora_shrink(product, x, a, indices, 1.0)
            self.ops.lora_expand(y, product, b, indices, columns, 0, True)

        return [call]

    def mla_decode(self, heads: int, batch: int, context: int) -> list[Call]:
        """Latents are the keys of one head; their first part is the values."""
        table, starts, lengths = self.batch(batch, 1, context)
        query = self.random(batch, heads, 576)
        output = self.random(batch, heads, 512)
        one = self.random(table.numel(), 1, BLOCK, 576)
        caches = [one, *(one.clone() for _ in range(copies(2 * one.numel()) - 1))]
        options = (0.1, True, -1, -1, 0.0, None, None)
        call = self.ops.paged_attention
        return [lambda kv=kv: call(output, query, kv, kv[..., :512], table, starts, lengths, *options) for kv in caches]

    def rms_norm(self, width: int, rows: int) -> list[Call]:
        """Norm of each row."""
        x, weight = self.random(rows, width), self.random(width)
        return [lambda: self.ops.rms_norm(x, weight, 1e-6)]

    def fused_add_rms_norm(self, width: int, rows: int) -> list[Call]:
        """Norm of the sum, in place."""
        x, residual, weight = self.random(rows, width), self.random(rows, width), self.random(width)
        return [lambda: self.ops.fused_add_rms_norm(x, residual, weight, 1e-6)]

    def silu_and_mul(self, width: int, rows: int) -> list[Call]:
        """SwiGLU."""
        x = self.random(rows, 2 * width)
        return [lambda: self.ops.silu_and_mul(x)]

    def gelu_tanh_and_mul(self, width: int, rows: int) -> list[Call]:
        """GeGLU."""
        x = self.random(rows, 2 * width)
        return [lambda: self.ops.gelu_and_mul(x, True)]

    def rotary(self, heads: int, kv_heads: int, size: int, rows: int) -> list[Call]:
        """Neox style on queries and keys."""
        q, k = self.random(rows, heads * size), self.random(rows, kv_heads * size)
        positions, angles = self.tensor(torch.arange(rows), torch.int64), self.random(8192, size)
        return [lambda: self.ops.rotary_embedding(positions, q, k, size, angles, True)]

    def cache_write(self, kv_heads: int, size: int, rows: int) -> list[Call]:
        """One slot a token."""
        k, v = self.random(rows, kv_heads, size), self.random(rows, kv_heads, size)
        kv = self.random(64, kv_heads, BLOCK, 2 * size)
        slots = self.tensor(torch.arange(rows) + 5, torch.int64)
        return [lambda: self.ops.reshape_and_cache(k, v, kv[..., :size], kv[..., size:], slots)]

    def argmax(self, batch: int) -> list[Call]:
        """Greedy."""
        logits = self.random(batch, VOCABULARY, dtype=torch.float32)
        return [lambda: self.ops.argmax(logits)]

    def top_k(self, batch: int, k: int | None = 50, p: float | None = None) -> list[Call]:
        """The mask, on a fresh copy of the logits."""
        logits = self.random(batch, VOCABULARY, dtype=torch.float32) * 40
        ks = None if k is None else self.tensor([k] * batch, torch.int32)
        ps = None if p is None else self.tensor([p] * batch, torch.float32)
        return [lambda: self.ops.top_k_top_p(logits.clone(), ks, ps)]

    def top_p(self, batch: int) -> list[Call]:
        """Nucleus alone."""
        return self.top_k(batch, None, 0.9)

    def top_k_top_p(self, batch: int) -> list[Call]:
        """Both."""
        return self.top_k(batch, 50, 0.9)


class Peer(Contestant):
    """vLLM's CPU kernels, chosen as vLLM chooses them."""

    def __init__(self) -> None:
        """Load the library of this machine's instruction set."""
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        self.ops = torch.ops._C
        self.isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        if self.isa == "amx":
            # In an engine a linear layer comes first, which asks the system for leave; vLLM's attention does not ask.
            torch.cpu._init_amx()

    def linear(self, m: int, n: int, k: int) -> list[Call]:
        """Weights packed as vLLM packs them after loading."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        x, layers = self.random(m, k), []
        for _ in range(copies(self.dtype.itemsize * n * k)):
            layer = torch.nn.Linear(k, n, bias=False, dtype=self.dtype)
            layer.weight.requires_grad_(False)
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            layers.append(layer)
        return [lambda layer=layer: layer.cpu_linear(x, layer.weight, None) for layer in layers]

    def decode(
        self, heads: int, kv_heads: int, size: int, batch: int, queries: int, context: int, cache: str
    ) -> list[Call]:
        """The plan of a step is made outside, as layers share it."""
        if cache != "auto":
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            _get_attn_isa(self.dtype, BLOCK, size, cache)
            msg = f"no {cache} cache on this machine"
            raise NotImplementedError(msg)
        table, starts, lengths = self.batch(batch, queries, context)
        query = self.random(batch * queries, heads, size)
        output = torch.empty_like(query)
        plan = self.ops.get_scheduler_metadata(
            batch, heads, kv_heads, size, lengths, self.dtype, starts, True, -1, self.isa, True, None, "auto"
        )
        one = self.random(table.numel(), kv_heads, 2 * BLOCK, size)
        caches = [one, *(one.clone() for _ in range(copies(one.nbytes) - 1))]

        def call(keys: Tensor, values: Tensor) -> None:
            self.ops.cpu_attention_with_kv_cache(
                query, keys, values, output, starts, lengths, size**-0.5, True, None, -1, table, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip

        return [lambda kv=kv: call(*kv.chunk(2, dim=2)) for kv in caches]

    prefill = decode

    def experts(self, hidden: int, width: int, experts: int, top_k: int, tokens: int) -> list[Call]:
        """Weights packed as vLLM packs them after loading."""
        import vllm._custom_ops as ops

        x, out = self.random(tokens, hidden), self.random(tokens, hidden)
        w13 = ops.cpu_prepack_moe_weight(self.weights(experts, 2 * width, hidden), self.isa)
        w2 = ops.cpu_prepack_moe_weight(self.weights(experts, hidden, width), self.isa)

        def call(weight: Tensor, ids: Tensor) -> None:
            ops.cpu_fused_moe(out, x, w13, w2, None, None, weight, ids, "silu", self.isa)

        return [lambda c=c: call(*c) for c in self.choices(experts, top_k, tokens)]

    def lora(self, **numbers: int) -> list[Call]:
        """As vLLM's runner sets it up: as a prefill, whatever the batch."""
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        x, a, b, columns, indices = self.adapters(**numbers)
        y, wrapper = self.random(len(x), sum(columns)), PunicaWrapperCPU(len(x), len(x), "cpu")
        wrapper._token_lora_indices.copy_(indices)
        wrapper.indices_len[0] = len(x)
        wrapper.is_prefill = True
        wrapper._update_prefill_metadata(indices)
        return [lambda: wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, tuple(columns))]

    def mla_decode(self, heads: int, batch: int, context: int) -> list[Call]:
        """The kernel that vLLM's CPU_MLA backend calls; its blocks have 16 tokens."""
        blocks = context // 16
        table = torch.randperm(batch * blocks).view(batch, blocks).int()
        lengths = torch.full((batch,), context, dtype=torch.int32)
        query, output = self.random(batch, heads, 576), self.random(batch, heads, 512)
        one = self.random(table.numel(), 16, 576)
        caches = [one, *(one.clone() for _ in range(copies(one.nbytes) - 1))]
        call = self.ops.mla_decode_kvcache
        return [lambda kv=kv: call(output, query, kv, 0.1, table, lengths) for kv in caches]

    def rms_norm(self, width: int, rows: int) -> list[Call]:
        """Norm of each row."""
        x, weight = self.random(rows, width), self.random(width)
        return [lambda: self.ops.rms_norm(torch.empty_like(x), x, weight, 1e-6)]

    def fused_add_rms_norm(self, width: int, rows: int) -> list[Call]:
        """Norm of the sum, in place."""
        x, residual, weight = self.random(rows, width), self.random(rows, width), self.random(width)
        return [lambda: self.ops.fused_add_rms_norm(x, residual, weight, 1e-6)]

    def silu_and_mul(self, width: int, rows: int) -> list[Call]:
        """SwiGLU."""
        x = self.random(rows, 2 * width)
        return [lambda: self.ops.silu_and_mul(x.new_empty(rows, width), x)]

    def gelu_tanh_and_mul(self, width: int, rows: int) -> list[Call]:
        """GeGLU."""
        x = self.random(rows, 2 * width)
        return [lambda: self.ops.gelu_tanh_and_mul(x.new_empty(rows, width), x)]

    def rotary(self, heads: int, kv_heads: int, size: int, rows: int) -> list[Call]:
        """Neox style on queries and keys."""
        q, k = self.random(rows, heads * size), self.random(rows, kv_heads * size)
        positions, angles = self.tensor(torch.arange(rows), torch.int64), self.random(8192, size)
        return [lambda: self.ops.rotary_embedding(positions, q, k, size, angles, True)]

    def cache_write(self, kv_heads: int, size: int, rows: int) -> list[Call]:
        """One slot a token."""
        k, v = self.random(rows, kv_heads, size), self.random(rows, kv_heads, size)
        keys, values = self.random(64, kv_heads, 2 * BLOCK, size).chunk(2, dim=2)
        slots = self.tensor(torch.arange(rows) + 5, torch.int64)
        return [lambda: self.ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, self.isa)]

    def argmax(self, batch: int) -> list[Call]:
        """Greedy."""
        logits = self.random(batch, VOCABULARY, dtype=torch.float32)
        if batch == 1:  # as vLLM's sampler does
            return [lambda: logits.argmax(dim=-1)]
        return [lambda: self.ops.greedy_argmax(logits)]

    def top_k(self, batch: int, k: int | None = 50, p: float | None = None) -> list[Call]:
        """The mask, on a fresh copy of the logits."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        logits = self.random(batch, VOCABULARY, dtype=torch.float32) * 40
        ks = None if k is None else self.tensor([k] * batch, torch.int64)
        ps = None if p is None else self.tensor([p] * batch, torch.float32)
        return [lambda: apply_top_k_top_p_pytorch(logits.clone(), ks, ps, True)]

    def top_p(self, batch: int) -> list[Call]:
        """Nucleus alone."""
        return self.top_k(batch, None, 0.9)

    def top_k_top_p(self, batch: int) -> list[Call]:
        """Both."""
        return self.top_k(batch, 50, 0.9)


if __name__ == "__main__":
    main(*sys.argv[1:])
