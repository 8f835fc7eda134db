"""One rank of all cores beside as many ranks of one core each (TP), in turns: ``nox -s bench -- ranks``.

Both engines of a round are up at once and are asked case by case, as in :mod:`tests.benchmarks.runners`. The goal is 0.95 of the speed
of one rank: what the exchange of data between ranks may cost.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import SHAPES
from tests.benchmarks.machine import machine
from tests.benchmarks.results import abba
from tests.benchmarks.runners import table, together


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="in which each case is asked in a round")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    one, many = f"1 rank, {cores} threads", f"{cores} ranks, 1 thread"
    variants: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        one: ({"NPU_NUM_THREADS": str(cores)}, {}),
        many: ({"NPU_NUM_THREADS": "1", "NPU_SIMULATOR_DEVICES": str(cores)}, {"tensor_parallel_size": cores}),
    }
    print(f"Machine: {machine()}. Shape: {options.shape}, {options.rounds} rounds of {options.turns} turns.\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, SHAPES[options.shape])
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for number in range(options.rounds):
            names = abba(list(variants), number)
            found = together(model, {name: variants[name] for name in names}, turns=options.turns)
            for name, figures in found.items():
                turns[name].append(figures)
    table(turns)


if __name__ == "__main__":
    main()
