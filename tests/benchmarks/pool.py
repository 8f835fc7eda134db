"""What loops on the device's threads cost, here and on more cores than are here: ``python -m tests.benchmarks.pool``.

Beside the pool of today, where each thread has a share of a loop, runs the one before it, where all chunks came from one
counter. Here: loops of several sizes, on as many threads as cores and on more, the two pools in turn. On many cores: a
model of the cache lines that either pool moves (``pool_model.cpp`` says by which rules), with the cost of a line's way
between two cores as it was measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.benchmarks.machine import machine

HERE = Path(__file__).parent
SIMULATOR = HERE.parents[1] / "packages" / "npu-platform" / "csrc"
SOURCES = (SIMULATOR / "simulator" / "thread_pool.cpp", SIMULATOR / "config" / "processors.cpp")
POOLS = ("one_counter", "shares")
CORES = len(os.sched_getaffinity(0))
LOOPS = ((2, 0), (16, 0), (16, 500), (16, 2000), (128, 500), (16, 20000))  # grains, and nanoseconds of one
THREADS = (2, 8, 16, 32, 64, 128)
STEPS = ("empty", "qwen3-0.6b", "llama-3-8b")


class Program:
    """A program beside this file, which answers a line with a line."""

    def __init__(self, folder: Path, name: str, *sources: Path) -> None:
        """Compile and start it."""
        path = str(folder / name)
        flags = ["-std=c++20", "-O2", "-pthread", f"-I{SIMULATOR}"]
        all_sources = map(str, (HERE / f"{name}.cpp", *sources))
        subprocess.run([os.environ.get("CXX", "c++"), *flags, *all_sources, "-o", path], check=True)
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> list[float]:
        """Return the numbers of the answer."""
        self.tell(*words)
        assert self.process.stdout is not None
        return [float(number) for number in self.process.stdout.readline().split()]

    def tell(self, *words: object) -> None:
        """Write a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.pool", description=__doc__)
    parser.add_argument("--repeats", type=int, default=400, help="loops in a turn, of which each pool has five")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of the model")
    options = parser.parse_args(arguments)
    print(f"Machine: {machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Program(folder, "pool", *SOURCES) as program:
            own, way, wake = program.ask("atomics")
            print(
                f"Atomic on an own line {own:.1f} ns, a line's way to another core {way:.0f} ns, waking {wake:.0f} ns."
            )
            print_loops(program, options.repeats)
        with Program(folder, "pool_model") as model:
            model.tell(own, way)
            print_steps(model, options.steps)


def print_loops(program: Program, repeats: int) -> None:
    """Print what loops take here, on both pools: the medians of turns that alternate."""
    print(
        "\n| threads | grains | work (us) | one counter (us) | shares (us) | 99 % of them (us) |\n|---|---|---|---|---|---|"
    )
    for threads in (CORES, 2 * CORES, 8 * CORES):
        for grains, each in LOOPS:
            samples: dict[str, list[float]] = {pool: [] for pool in POOLS}
            for _ in range(5):
                for pool in POOLS:
                    samples[pool] += program.ask("loops", pool, threads, grains, each, 2000, repeats)
            medians = [f"{statistics.median(of) / 1e3:.2f}" for of in samples.values()]
            tails = [f"{statistics.quantiles(of, n=100)[-1] / 1e3:.1f}" for of in samples.values()]
            work = f"{grains * each / 1e3:g}"
            print(f"| {threads} | {grains} | {work} | {' | '.join(medians)} | {' and '.join(tails)} |", flush=True)


def print_steps(model: Program, steps: int) -> None:
    """Print what the model says of a decode step on many cores."""
    print("\n| step | threads | without a pool (ms) | one counter (ms) | shares (ms) |\n|---|---|---|---|---|")
    for step in STEPS:
        for threads in THREADS:
            alone, counter, shares = (number / 1e3 for number in model.ask(step, threads, steps))
            print(f"| {step} | {threads} | {alone:.2f} | {counter:.2f} | {shares:.2f} |", flush=True)


if __name__ == "__main__":
    main()
