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
from typing import Any

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import SHAPES
from tests.benchmarks.machine import machine

RUNNERS = {name: {"VLLM_USE_V2_MODEL_RUNNER": value} for name, value in (("V1", "0"), ("V2", "1"))}


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
            for name, environ in RUNNERS.items():
                turns[name].append(turn(model, environ, {}))
    table({name: counted[1:] for name, counted in turns.items()})


def turn(model: Path, environ: dict[str, str], engine: dict[str, Any]) -> dict[str, float]:
    """Return the median milliseconds of each case in one engine of these settings, and the seconds to its first token."""
    command = [sys.executable, "-m", "tests.benchmarks.engine_contestant", str(model), str(time.time()), "split"]
    command.append(json.dumps(engine))
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        msg = f"the engine failed:\n{(done.stdout + done.stderr)[-4000:]}"
        raise RuntimeError(msg)
    result = json.loads(line.removeprefix("RESULT "))
    cases = {f"{name}, ms": statistics.median(seconds) * 1e3 for name, seconds in result["seconds"].items()}
    return cases | {"start to first token, s": result["first_token_s"]}


def table(turns: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of both contestants' turns, and the second's over the first's."""
    first, second = turns
    print(f"| | {first} | {second} | {second} / {first} |\n|---|---|---|---|")
    for case in turns[first][0]:
        one, two = (statistics.median(turn[case] for turn in turns[name]) for name in turns)
        print(f"| {case} | {one:.3f} | {two:.3f} | {two / one:.2f} |")


if __name__ == "__main__":
    main()
