"""Triton kernels on npu beside torch's on the host's memory, in one run: ``nox -s bench -- triton``.

Public kernels beside torch's, and, at a smaller size, beside Triton's own interpreter, in a process of its own; a kernel
that only moves memory, as a share of the best copy; and what a launch costs. Medians over interleaved samples of wall
time, all cores. What comes out is compared before it is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import triton
from triton.runtime.errors import InterpreterError

from tests.benchmarks import triton_kernels as kernels
from tests.benchmarks.machine import machine
from tests.benchmarks.triton_cases import CASES, Case

SAMPLES = 9
INTERPRETER = 60  # seconds that it gets
ELEMENTS = 1 << 25  # of the vectors: 128 MiB of floats, more than any cache


def main(arguments: list[str]) -> None:
    """Print the tables; ``--small`` prints the seconds of each case's small size, a line of JSON each, for another process."""
    if arguments == ["--small"]:
        for case in CASES:
            try:
                print(json.dumps([case.name, small(case)]), flush=True)
            except (AssertionError, InterpreterError) as problem:  # it multiplies bfloat16 as integers
                print(case.name, problem, file=sys.stderr)
        return
    print(f"Machine: {machine()}\n")
    print("| kernel | npu, ms | torch, ms | npu / torch | first call, s | small: npu, ms | interpreter, ms |")
    print("|---|---|---|---|---|---|---|")
    interpreted = in_the_interpreter()
    for case in CASES:
        print(line(case, interpreted.get(case.name)), flush=True)
    print(f"\n{memory_and_launches()}")


def line(case: Case, interpreted: float | None) -> str:
    """Return a case's line of the table."""
    torch.manual_seed(0)
    run, by_torch = case.build(case.size)
    began = time.perf_counter()
    run()
    first = time.perf_counter() - began
    check(case, run, by_torch)
    ours, theirs = median([run, by_torch])
    there = "-" if interpreted is None else f"{interpreted * 1e3:.0f}"
    times = f"{ours * 1e3:.3f} | {theirs * 1e3:.3f} | {ours / theirs:.2f} | {first:.2f}"
    return f"| {case.name} | {times} | {small(case) * 1e3:.3f} | {there} |"


def check(case: Case, run: Callable[[], torch.Tensor], by_torch: Callable[[], torch.Tensor]) -> None:
    """Raise AssertionError where what comes out is not what torch has."""
    ours, theirs = run().cpu().float(), by_torch().float()
    if case.tolerance < float("inf"):
        torch.testing.assert_close(ours, theirs, rtol=case.tolerance, atol=case.tolerance)
    else:  # drawn
        torch.testing.assert_close(ours.mean(), theirs.mean(), rtol=0.05, atol=0.05)


def small(case: Case) -> float:
    """Return the median seconds of a case's small size, after it was compared."""
    torch.manual_seed(0)
    run, by_torch = case.build(case.small)
    check(case, run, by_torch)
    return median([run], 3)[0]


def in_the_interpreter() -> dict[str, float]:
    """Return the seconds of the small sizes in Triton's interpreter, of as many as it gets through."""
    command = [sys.executable, "-m", "tests.benchmarks.triton", "--small"]
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    try:
        said = subprocess.run(command, env=environ, check=False, stdout=subprocess.PIPE, timeout=INTERPRETER).stdout
    except subprocess.TimeoutExpired as ended:
        said = ended.stdout or b""
    return dict(json.loads(line) for line in said.decode().splitlines() if line.startswith("["))


def memory_and_launches() -> str:
    """Return the bandwidth of a kernel that doubles a vector beside torch's, and the times of launches."""
    x, y = torch.randn(ELEMENTS), torch.empty(ELEMENTS)
    source, target = x.to("npu"), torch.empty(ELEMENTS, device="npu")
    blocks = (triton.cdiv(ELEMENTS, 4096),)
    double = kernels.scale_kernel[blocks]
    ours, theirs = median([lambda: double(source, target, ELEMENTS, 4096), lambda: torch.mul(x, 2, out=y)])
    rate = 2 * 4 * ELEMENTS / 1e9
    four, thirteen = launches()
    return (
        f"A vector of 128 MiB, doubled: {rate / ours:.1f} GB/s; torch {rate / theirs:.1f}. A launch, the least of the "
        f"samples: {four * 1e6:.1f} us with four arguments, {thirteen * 1e6:.1f} with thirteen."
    )


def launches() -> list[float]:
    """Return the least seconds of a launch of one small program with four arguments, and of one with thirteen."""
    few = [torch.zeros(192, device="npu") for _ in range(8)]
    double, add = kernels.scale_kernel[(1,)], kernels.sum_kernel[(1,)]
    least = [float("inf")] * 2
    for _ in range(10 * SAMPLES):
        for place, launch in enumerate((lambda: double(*few[:2], 64, 64), lambda: add(*few, 64, 2, 3, 1.5, 64))):
            launch()
            began = time.perf_counter()
            for _ in range(200):
                launch()
            least[place] = min(least[place], (time.perf_counter() - began) / 200)
    return least


def median(functions: list[Callable[[], object]], samples: int = SAMPLES) -> list[float]:
    """Return the median seconds of each, over samples taken in turn."""
    seconds: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(samples):
        for function, into in zip(functions, seconds, strict=True):
            began = time.perf_counter()
            function()
            into.append(time.perf_counter() - began)
    return [statistics.median(each) for each in seconds]


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_BACKEND", "npu")  # vLLM then has its kernels
    main(sys.argv[1:])
