"""vLLM's V1 and V2 model runners on npu, in turns: ``nox -s bench -- runners``.

Each turn is a process of its own with a whole engine (``tests.benchmarks.engine_contestant``): a prefill of 512 tokens and
decode steps of batch 1, 8 and 32. With ``--shape tiny`` a step is next to nothing but the runner. The first turn of each is
not counted: it may compile Triton's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import SHAPES
from tests.benchmarks.machine import machine

RUNNERS = {"V1": "0", "V2": "1"}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"Machine: {machine()}. Shape: {options.shape}, {options.rounds} rounds.\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, SHAPES[options.shape])
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in RUNNERS}
        for _ in range(options.rounds + 1):
            for name, value in RUNNERS.items():
                turns[name].append(turn(model, value))
    table({name: counted[1:] for name, counted in turns.items()})


def turn(model: Path, v2: str) -> dict[str, float]:
    """Return the median milliseconds of each case in one engine, and the seconds to its first token."""
    environ = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": v2}
    command = [sys.executable, "-m", "tests.benchmarks.engine_contestant", str(model), str(time.time()), "split", "{}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        msg = f"the engine failed:\n{(done.stdout + done.stderr)[-4000:]}"
        raise RuntimeError(msg)
    result = json.loads(line.removeprefix("RESULT "))
    cases = {f"{name}, ms": statistics.median(seconds) * 1e3 for name, seconds in result["seconds"].items()}
    return cases | {"start to first token, s": result["first_token_s"]}


def table(turns: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of the turns, and V2's over V1's."""
    print("| | V1 | V2 | V2 / V1 |\n|---|---|---|---|")
    for case in turns["V1"][0]:
        one, two = (statistics.median(turn[case] for turn in turns[name]) for name in RUNNERS)
        print(f"| {case} | {one:.3f} | {two:.3f} | {two / one:.2f} |")


if __name__ == "__main__":
    main()
