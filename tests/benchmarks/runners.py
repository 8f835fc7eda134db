"""vLLM's V1 and V2 model runners on npu, in turns: ``nox -s bench -- runners``.

Each turn is a process of its own with a whole engine (``tests.benchmarks.engine_contestant``): a prefill of 512 tokens and
decode steps of batch 1 to 32, greedy and with other choices of tokens. With ``--shape tiny`` a step is next to nothing but
the runner. With ``--keep FILE`` turns are added to those that are there, and the table is of all. Before the first, an
engine of each runner fills caches: it may compile Triton's kernels.
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
COMPILED = "compilations while it served"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a file of JSON to which turns are added")
    options = parser.parse_args()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    turns: dict[str, list[dict[str, float]]] = {name: kept.get(name, []) for name in RUNNERS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(model, SHAPES[options.shape])
        for environ in () if kept else RUNNERS.values():
            turn(model, environ, {}, "trial")
        for _ in range(options.rounds):
            # Who begins changes from round to round, so that a machine that slows down favours neither.
            for name in list(RUNNERS)[:: 1 if len(turns["V1"]) % 2 else -1]:
                turns[name].append(turn(model, RUNNERS[name], {}, "runners"))
                if options.keep:
                    options.keep.write_text(json.dumps(turns))
    print(f"Machine: {machine()}. Shape: {options.shape}, {len(turns['V1'])} turns each.\n")
    table(turns)


def turn(model: Path, environ: dict[str, str], engine: dict[str, Any], cases: str = "split") -> dict[str, float]:
    """Return the median milliseconds of each case in one engine of these settings, and the seconds to its first token."""
    command = [sys.executable, "-m", "tests.benchmarks.engine_contestant", str(model), str(time.time()), cases]
    command.append(json.dumps(engine))
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        msg = f"the engine failed:\n{(done.stdout + done.stderr)[-4000:]}"
        raise RuntimeError(msg)
    result = json.loads(line.removeprefix("RESULT "))
    medians = {f"{name}, ms": statistics.median(seconds) * 1e3 for name, seconds in result["seconds"].items()}
    # vLLM's own monitor tells of each kernel that is compiled after the warm-up.
    compiled = (done.stdout + done.stderr).count("JIT compilation during inference")
    return medians | {"start to first token, s": result["first_token_s"], COMPILED: compiled}


def table(turns: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of both contestants' turns, and the second's over the first's."""
    first, second = turns
    print(f"| | {first} | {second} | {second} / {first} |\n|---|---|---|---|")
    for case in turns[first][0]:
        one, two = (statistics.median(turn[case] for turn in turns[name]) for name in turns)
        if case == COMPILED:
            print(f"| {case} | {one:.0f} | {two:.0f} | |")
        else:
            print(f"| {case} | {one:.3f} | {two:.3f} | {two / one:.2f} |")


if __name__ == "__main__":
    main()
