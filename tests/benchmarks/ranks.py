"""One rank of all cores beside as many ranks of one core each (TP), in turns: ``nox -s bench -- ranks``.

Each turn is a process of its own with a whole engine, as in :mod:`tests.benchmarks.runners`. The goal is 0.95 of the speed
of one rank: what the exchange of data between ranks may cost.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import SHAPES
from tests.benchmarks.machine import machine
from tests.benchmarks.runners import table, turn


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    one, many = f"1 rank, {cores} threads", f"{cores} ranks, 1 thread"
    environs = {
        one: {"NPU_NUM_THREADS": str(cores)},
        many: {"NPU_NUM_THREADS": "1", "NPU_SIMULATOR_DEVICES": str(cores)},
    }
    engines = {one: {}, many: {"tensor_parallel_size": cores}}
    print(f"Machine: {machine()}. Shape: {options.shape}, {options.rounds} rounds.\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, SHAPES[options.shape])
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                turns[name].append(turn(model, environs[name], engine))
    table(turns)


if __name__ == "__main__":
    main()
