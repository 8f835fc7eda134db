"""Loops, conditions, calls, assertions, prints and atomic operations."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language

from npu_platform.errors import KernelLaunchError, UnsupportedFeatureError


@triton.jit(noinline=True)
def apart(x, y):
    if x > y:
        return x * 2, x - y
    return y, x + y


@triton.jit
def control_kernel(x, o, n, limit, B: tl.constexpr):
    if tl.program_id(0) == 1:
        return
    i = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    swapped = tl.full((B,), 1.0, tl.float32)
    pointers = x + i
    offsets = i
    for step in range(n):
        if step % 2 == 0:
            total += tl.load(pointers) * swapped
        elif step > 4:
            total -= tl.load(x + offsets)
        total, swapped = total + 0.5, total * 0.25
        pointers += B
        offsets += B
    tl.store(o + i, total)
    tl.store(o + B + i, swapped)
    tl.store(o + 2 * B + i, offsets.to(tl.float32))
    count, value = 0, 1.0
    while value < limit:
        value = value * 1.5 + tl.load(x + count)
        count += 1
    a, b = apart(value, limit)
    c, d = apart(limit, value)
    last = 0.0
    for step in range(10, 0, -3):
        last = last * 2 + step
    found = 0
    for row in tl.static_range(3):
        for column in range(row, n):
            if row * column == 6:
                found += row * 10 + column
    tl.store(o + 3 * B + tl.arange(0, 8), tl.arange(0, 8).to(tl.float32) * 0 + value)
    tl.store(o + 3 * B, value)
    tl.store(o + 3 * B + 1, count.to(tl.float32))
    tl.store(o + 3 * B + 2, a + b)
    tl.store(o + 3 * B + 3, c + d)
    tl.store(o + 3 * B + 4, last)
    tl.store(o + 3 * B + 5, found.to(tl.float32))


def test_control_flow():
    n, size, limit = 9, 16, 30.0
    x = torch.rand(n * size)
    out = torch.zeros(3 * size + 8, device="npu")
    control_kernel[(2,)](x.to("npu"), out, n, limit, size)
    total, swapped = torch.zeros(size), torch.ones(size)
    for step in range(n):
        row = x[step * size : (step + 1) * size]
        if step % 2 == 0:
            total = total + row * swapped
        elif step > 4:
            total = total - row
        total, swapped = total + 0.5, total * 0.25
    torch.testing.assert_close(out.cpu()[: 2 * size].view(2, size), torch.stack([total, swapped]))
    assert out.cpu()[2 * size : 3 * size].tolist() == [n * size + i for i in range(size)]
    count, value = 0, 1.0
    while value < limit:
        value, count = value * 1.5 + x[count].item(), count + 1
    found = sum(row * 10 + column for row in range(3) for column in range(row, n) if row * column == 6)
    last = ((10 * 2 + 7) * 2 + 4) * 2 + 1
    expected = [value, count, value * 2 + value - limit, value + limit + value, last, found]
    torch.testing.assert_close(out.cpu()[3 * size : 3 * size + 6], torch.tensor(expected))


@triton.jit
def rotation_kernel(x, o, n, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    a = tl.load(x + at)
    b = a * 2
    for _ in range(n):
        a, b = tl.trans(b), a + 1
    tl.store(o + at, a)
    tl.store(o + B * B + at, b)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_carried_tensors_are_exchanged_at_once(n):
    x = torch.randn(8, 8)
    out = torch.empty(2, 8, 8, device="npu")
    rotation_kernel[(1,)](x.to("npu"), out, n, 8)
    a, b = x, x * 2
    for _ in range(n):
        a, b = b.T, a + 1
    torch.testing.assert_close(out.cpu(), torch.stack([a, b]))


@triton.jit
def says_kernel(x, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    tl.device_print('a 100% "quoted" value ', a)
    tl.device_assert(a < 3, "too large: {}")


def test_prints_and_assertions(capfd):
    says_kernel[(2,)](torch.tensor([0, 2], dtype=torch.int32, device="npu"), 2, debug=True)
    printed = capfd.readouterr().out
    assert "pid (1, 0, 0) idx (1)" in printed
    assert 'a 100% "quoted" value: 2' in printed
    with pytest.raises(KernelLaunchError, match="too large"):
        says_kernel[(2,)](torch.tensor([0, 3], dtype=torch.int32, device="npu"), 2, debug=True)
    says_kernel[(2,)](torch.tensor([0, 1], dtype=torch.int32, device="npu"), 2, debug=True)


@triton.jit
def lists_kernel(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.device_print("of ", tl.load(x + i), n)


def test_what_a_program_prints_stands_together_and_is_there_when_the_launch_is_done(capfd):
    lists_kernel[(32,)](torch.arange(32 * 1024, device="npu"), 7, 1024)
    torch.npu.synchronize()
    lines = capfd.readouterr().out.splitlines()
    programs = [lines[begin : begin + 1025] for begin in range(0, len(lines), 1025)]
    expected = [
        [f"pid ({p}, 0, 0) idx ({i:4}) of: (operand 0) {1024 * p + i}" for i in range(1024)]
        + [f"pid ({p}, 0, 0) idx () of: (operand 1) 7"]
        for p in range(32)
    ]
    assert sorted(programs) == sorted(expected)


@triton.jit
def returning_kernel(x):
    return tl.load(x)


def test_a_kernel_that_returns_a_value_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="returning_kernel returns a value, which nobody gets: store it"):
        returning_kernel[(1,)](torch.zeros(1, device="npu"))


@gluon.jit
def gluon_kernel(x):
    gluon_language.store(x, 1.0)


def test_gluon_is_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match=r"Gluon .* write the kernel in triton\.language"):
        gluon_kernel[(1,)](torch.zeros(1, device="npu"))


@triton.jit
def atomic_kernel(add, fadd, high, low, bits, old, lock, guarded, B: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, B)
    tl.atomic_add(add, 1)
    tl.atomic_add(fadd + i % 4, 0.5 + i * 0.0, mask=i < B - 1)
    tl.atomic_max(high + i, pid * (i + 1))
    tl.atomic_min(low, pid - 5)
    tl.atomic_or(bits, (1 << (pid % 31)))
    tl.atomic_xor(bits + 1, pid)
    tl.atomic_and(bits + 2, ~(1 << (pid % 31)))
    tl.store(old + pid, tl.atomic_xchg(old + 1000, pid))
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(guarded, tl.load(guarded) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def test_atomic_operations_of_many_programs():
    programs, size = 500, 16
    ints = {"dtype": torch.int32, "device": "npu"}
    add, lock, guarded, low = (torch.zeros(1, **ints) for _ in range(4))
    fadd, high = torch.zeros(4, device="npu"), torch.zeros(size, **ints)
    bits, old = torch.tensor([0, 0, -1], **ints), torch.full((1001,), -1, **ints)
    atomic_kernel[(programs,)](add, fadd, high, low, bits, old, lock, guarded, size)
    assert add.item() == guarded.item() == programs
    assert fadd.tolist() == [programs * 2, programs * 2, programs * 2, programs * 1.5]
    assert high.tolist() == [(programs - 1) * (i + 1) for i in range(size)]
    assert low.item() == -5
    exclusive = 0
    for pid in range(programs):
        exclusive ^= pid
    assert bits.tolist() == [2**31 - 1, exclusive, -(2**31)]
    assert sorted([*old.tolist()[:programs], old[1000].item()]) == [-1, *range(programs)]


@triton.jit
def float_atomic_kernel(x, y, z, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(x + i * 0, 1.0 + 0.0 * i)
    tl.atomic_max(y + i * 0, i.to(tl.float32) - 10)
    tl.atomic_min(y + i * 0 + 1, i.to(tl.float32) - 10)
    tl.atomic_cas(z, tl.full((), 0, tl.int64), tl.full((), 5, tl.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_atomic_operations_of_floats(dtype):
    x, y = torch.zeros(1, dtype=dtype, device="npu"), torch.zeros(2, device="npu")
    z = torch.zeros(1, dtype=torch.int64, device="npu")
    float_atomic_kernel[(8,)](x, y, z, 32)
    assert (x.item(), y.tolist(), z.item()) == (256, [21, -10], 5)


@triton.jit
def single_kernel(x, o):
    first, second = tl.split(tl.load(x + tl.arange(0, 2)) * 2)
    tl.assume(second > 0)
    if first > 80:
        tl.store(o, first)
        tl.store(o + 1, second)
    flag = tl.full((32, 32), 1, tl.int1)
    tl.store(o + 2, tl.sum(flag, dtype=tl.int1).to(tl.int32))
    tl.store(o + 3, tl.sum(flag).to(tl.int32))


def test_tensors_of_one_element_and_numbers_of_one_bit():
    out = torch.zeros(4, dtype=torch.int32, device="npu")
    single_kernel[(1,)](torch.tensor([40, 7], dtype=torch.int32, device="npu"), out)
    assert out.tolist() == [0, 0, 0, 1024]
    single_kernel[(1,)](torch.tensor([41, 7], dtype=torch.int32, device="npu"), out)
    assert out.tolist() == [82, 14, 0, 1024]


@triton.jit
def timed_kernel(x, o, N: tl.constexpr):
    begin = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    for _ in range(1000):
        tl.store(x + tl.arange(0, N), tl.load(x + tl.arange(0, N)) + 1)
    end = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(o, end - begin)


def test_the_clock_of_a_gpu_is_the_clock_of_the_host():
    x, out = torch.zeros(64, device="npu"), torch.zeros(1, dtype=torch.int64, device="npu")
    timed_kernel[(1,)](x, out, 64)
    assert x.eq(1000).all()
    assert 0 < out.item() < 10**10


@triton.jit
def unrolled_kernel(o, n, BY: tl.constexpr):
    for step in tl.range(0, n, loop_unroll_factor=BY):
        tl.atomic_add(o, step)


def test_a_loop_is_unrolled_as_often_as_it_asks():
    out = torch.zeros(1, dtype=torch.int32, device="npu")
    for factor in (1, 4):
        kernel = unrolled_kernel[(1,)](out, 10, factor)
        assert kernel.asm["ttir"].count("tt.atomic_rmw") >= factor
    assert out.item() == 90
