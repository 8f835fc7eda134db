"""Twelve public kernels with what torch has instead: of Triton's tutorials, and vLLM's own (flash-linear-attention)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from tests.benchmarks import triton_kernels as kernels

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A kernel: its name, and what makes it, and torch's, for a size; the same values come out, within a tolerance."""

    name: str
    build: Callable[[int], tuple[Call, Call]]
    """Of a size: what runs on npu, and what runs on the host."""
    size: int
    small: int
    """For the interpreter, which is a thousand times slower."""
    tolerance: float = 1e-4


def npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return copies on the device."""
    return [tensor.to("npu") for tensor in tensors]


def add(n: int) -> tuple[Call, Call]:
    """Add vectors of n."""
    x, y = torch.randn(n), torch.randn(n)
    a, b = npu(x, y)
    out = torch.empty_like(a)

    def run() -> torch.Tensor:
        kernels.add_kernel[(triton.cdiv(n, 4096),)](a, b, out, n, 4096)
        return out

    return run, lambda: x + y


def softmax(rows: int) -> tuple[Call, Call]:
    """Softmax of rows of 1000."""
    x = torch.randn(rows, 1000)
    (a,) = npu(x)
    out = torch.empty_like(a)

    def run() -> torch.Tensor:
        kernels.softmax_kernel[(rows,)](a, out, 1000, 1024)
        return out

    return run, lambda: x.softmax(1)


def matmul(n: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """Multiply matrices of n x n."""
    x, y = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    a, b = npu(x, y)
    out = torch.empty(n, n, device="npu")

    def run() -> torch.Tensor:
        kernels.matmul_kernel[(n // 64, n // 64)](a, b, out, n, n, 64, 64, 64)
        return out

    return run, lambda: x @ y


def layer_norm(rows: int) -> tuple[Call, Call]:
    """Layer norm of rows of 1024."""
    x, w, b = torch.randn(rows, 1024), torch.rand(1024), torch.randn(1024)
    given = npu(x, w, b)
    out = torch.empty_like(given[0])

    def run() -> torch.Tensor:
        kernels.layer_norm_kernel[(rows,)](*given, out, 1024, 1e-5, 1024)
        return out

    return run, lambda: torch.nn.functional.layer_norm(x, (1024,), w, b)


def rms_norm(rows: int) -> tuple[Call, Call]:
    """RMS norm of rows of 1024."""
    x, w = torch.randn(rows, 1024), torch.rand(1024)
    given = npu(x, w)
    out = torch.empty_like(given[0])

    def run() -> torch.Tensor:
        kernels.rms_norm_kernel[(rows,)](*given, out, 1024, 1e-5, 1024)
        return out

    return run, lambda: torch.nn.functional.rms_norm(x, (1024,), w, 1e-5)


def dropout(n: int) -> tuple[Call, Call]:
    """Dropout of n ones by half: the same numbers cannot come out, but their mean does."""
    x = torch.ones(n)
    (a,) = npu(x)
    out = torch.empty_like(a)

    def run() -> torch.Tensor:
        kernels.dropout_kernel[(triton.cdiv(n, 4096),)](a, out, n, 0.5, 7, 4096)
        return out

    return run, lambda: torch.nn.functional.dropout(x, 0.5)


def attention(length: int) -> tuple[Call, Call]:
    """Causal attention of four heads of 64."""
    q, k, v = torch.randn(3, 4, length, 64).bfloat16()
    given = npu(q, k, v)
    out = torch.empty_like(given[0])

    def run() -> torch.Tensor:
        kernels.attention_kernel[(length // 64, 4)](*given, out, length, 0.125, 64, 64, 64)
        return out

    attend = torch.nn.functional.scaled_dot_product_attention
    return run, lambda: attend(q[None], k[None], v[None], is_causal=True)[0]


def l2_norm(rows: int) -> tuple[Call, Call]:
    """vLLM's l2norm of rows of 128."""
    from vllm.third_party.flash_linear_attention.ops.l2norm import l2norm_fwd

    x = torch.randn(rows, 128).bfloat16()
    (a,) = npu(x)
    return lambda: l2norm_fwd(a), lambda: torch.nn.functional.normalize(x, dim=-1)


def chunk_sums(length: int) -> tuple[Call, Call]:
    """vLLM's sums within chunks of 64."""
    from vllm.third_party.flash_linear_attention.ops.cumsum import chunk_local_cumsum

    x = torch.randn(1, length, 8)
    (a,) = npu(x)
    return lambda: chunk_local_cumsum(a, 64), lambda: x.view(1, -1, 64, 8).cumsum(2).view_as(x)


def delta_rule(length: int, *, chunks: bool) -> tuple[Call, Call]:
    """vLLM's gated delta rule of four heads of 128, step by step or in chunks of 64."""
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule

    q, v = torch.randn(2, 1, length, 4, 128).bfloat16()
    k = torch.nn.functional.normalize(torch.randn(1, length, 4, 128), dim=-1).bfloat16()
    g, beta = -torch.rand(1, length, 4) * 0.1, torch.rand(1, length, 4)
    given, state = npu(q, k, v, g, beta), torch.zeros(1, 4, 128, 128, device="npu")
    ends = torch.tensor([0, length], dtype=torch.int32, device="npu")
    rule = chunk_gated_delta_rule if chunks else fused_recurrent_gated_delta_rule
    further = {"output_final_state": True} if chunks else {"inplace_final_state": False}

    def run() -> torch.Tensor:
        return rule(*given, initial_state=state, cu_seqlens=ends, **further)[0]

    return run, lambda: _delta_rule(q[0].float(), k[0].float(), v[0].float(), g[0], beta[0])[None]


def _delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    state, rows = torch.zeros(4, 128, 128), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        missing = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
        state = state + k[t][:, :, None] * missing[:, None, :]
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) / math.sqrt(128))
    return torch.stack(rows)


def top_k_top_p(rows: int) -> tuple[Call, Call]:
    """vLLM's filter of logits of 32,000 tokens."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    x, k, p = torch.randn(rows, 32000) * 3, torch.full((rows,), 50), torch.full((rows,), 0.9)
    a, most, share = npu(x, k.int(), p)
    return (
        lambda: apply_top_k_top_p_triton(a.clone(), most, share).nan_to_num(neginf=-100),
        lambda: apply_top_k_top_p_pytorch(x.clone(), k, p, allow_cpu_sync=True).nan_to_num(neginf=-100),
    )


CASES = [
    Case("vector addition, 16 M", add, 1 << 24, 1 << 16),
    Case("softmax, rows of 1000", softmax, 4096, 16),
    Case("matrix product, float32", lambda n: matmul(n, torch.float32), 1024, 128, 1e-2),
    Case("matrix product, bfloat16", lambda n: matmul(n, torch.bfloat16), 1024, 128, 1.0),
    Case("layer norm, rows of 1024", layer_norm, 4096, 16),
    Case("RMS norm, rows of 1024", rms_norm, 4096, 16),
    Case("dropout (Philox), 4 M", dropout, 1 << 22, 1 << 14, math.inf),
    Case("causal attention, 4 heads of 64", attention, 1024, 128, 5e-2),
    Case("fla: l2norm, rows of 128, bfloat16", l2_norm, 16384, 64, 2e-2),
    Case("fla: sums in chunks, 8 heads", chunk_sums, 1 << 16, 256),
    Case("fla: gated delta rule, step by step", lambda n: delta_rule(n, chunks=False), 256, 4, 5e-2),
    Case("fla: gated delta rule, in chunks", lambda n: delta_rule(n, chunks=True), 1024, 64, 5e-2),
    Case("vLLM: top-k and top-p, 32,000 tokens", top_k_top_p, 32, 1),
]
