"""Loops of kernels are such that g++ has vectors for them: those that call a function call its vector in libmvec."""

from __future__ import annotations

import os
import platform

import pytest
import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 4, 64

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35)
    or "clang" in os.environ.get("CXX", ""),
    reason="the vectors of glibc 2.35 on x86-64, as g++ calls them",
)


@triton.jit
def gate_kernel(x, z, o, rows, R: tl.constexpr, C: tl.constexpr):
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    place, mask = i * C + j, (i < rows) & (j < C)
    gate = tl.load(z + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(o + place, tl.load(x + place, mask=mask, other=0.0) * gate * tl.sigmoid(gate), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_function_of_narrow_numbers(dtype):
    torch.manual_seed(0)
    x, z = (torch.randn(ROWS, COLUMNS).to(dtype) for _ in range(2))
    out = torch.empty(ROWS, COLUMNS, dtype=dtype, device="npu")
    kernel = gate_kernel[(1,)](x.to("npu"), z.to("npu"), out, ROWS, ROWS, COLUMNS)
    torch.testing.assert_close(out.cpu(), (x.float() * torch.nn.functional.silu(z.float())).to(dtype))
    assert calls(kernel, "expf")


@triton.jit
def noise_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.log((tl.load(x + i).to(tl.uint64, bitcast=True) >> 11).to(tl.float64) + 0.5))


def test_a_function_of_64_bit_integers():
    x = torch.arange(COLUMNS) << 40
    out = torch.empty(COLUMNS, dtype=torch.float64, device="npu")
    kernel = noise_kernel[(1,)](x.to("npu"), out, COLUMNS)
    torch.testing.assert_close(out.cpu(), ((x >> 11).double() + 0.5).log())
    assert calls(kernel, "log")


def calls(kernel: triton.compiler.CompiledKernel, function: str) -> bool:
    """Say whether a kernel's library names a function's vector, whatever its width: _ZGV, its kind and arguments, _name."""
    names = kernel.asm["so"].split(b"\0")
    return any(name.startswith(b"_ZGV") and name.endswith(b"_" + function.encode()) for name in names)
