"""vLLM's V1 and V2 model runners on npu, in turns: ``nox -s bench -- runners``.

Both engines of a round are up at once, each in a process of its own, and are asked case by case
(``tests.benchmarks.engine_together``): a prefill of 512 tokens and decode steps of batch 1 to 32, greedy and with other
choices of tokens. With ``--shape tiny`` a step is next to nothing but the host's work, the runner's and the scheduler's; whole
generations are timed then. With ``--keep FILE`` turns are added to those that are there, and the table is of all. Before the first, an
engine of each runner fills caches: it may compile Triton's kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.checkpoint import write_model
from tests.benchmarks.engine_cases import CHOICES, SHAPES
from tests.benchmarks.engine_together import round_of
from tests.benchmarks.machine import machine
from tests.benchmarks.results import abba

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
        variants = {name: (environ, {}) for name, environ in RUNNERS.items()}
        if not kept:
            together(model, variants, "trial")
        for _ in range(options.rounds):
            # Who begins changes from round to round, so that a machine that slows down favours neither.
            names = abba(list(RUNNERS), len(turns["V1"]))
            cases = "host" if options.shape == "tiny" else "runners"
            for name, figures in together(model, {name: variants[name] for name in names}, cases).items():
                turns[name].append(figures)
            if options.keep:
                options.keep.write_text(json.dumps(turns))
    print(f"Machine: {machine()}. Shape: {options.shape}, {len(turns['V1'])} turns each.\n")
    table(turns)


def together(
    model: Path, variants: dict[str, tuple[dict[str, str], dict[str, Any]]], cases: str = "split", turns: int = 1
) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each case and the seconds to the first token of engines that are up at once.

    Args:
        model: its folder; what the engines print goes beside it.
        variants: environment and arguments of each by name.
        cases: a key of CHOICES.
        turns: of each case.
    """
    contestant = [sys.executable, "-m", "tests.benchmarks.engine_contestant", str(model), "{now}", cases]
    commands = {name: [*contestant, json.dumps(engine)] for name, (_, engine) in variants.items()}
    environs = {name: environ for name, (environ, _) in variants.items()}
    found, failures = round_of(commands, environs, CHOICES[cases], model.parent, turns)
    if failures:
        msg = f"engines failed: {failures}"
        raise RuntimeError(msg)
    return {name: figures(one, (model.parent / f"{name}.log").read_text()) for name, one in found.items()}


def figures(found: dict[str, Any], printed: str) -> dict[str, float]:
    """Return what the table shows of an engine."""
    medians = {f"{name}, ms": statistics.median(seconds) * 1e3 for name, seconds in found["seconds"].items()}
    # vLLM's own monitor tells of each kernel that is compiled after the warm-up.
    compiled = printed.count("JIT compilation during inference")
    return medians | {"start to first token, s": found["first_token_s"], COMPILED: compiled}


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
