"""One contestant of the engine benchmark, run by its own interpreter: prints one JSON line.

``python engine_case.py MODEL_FOLDER STARTED [ENGINE_JSON]``: STARTED is the wall clock (time.time()) at which the
parent started the process, so that the time to the first token includes the interpreter and all imports.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CONTEXT, STEPS, REPEATS = 64, 16, 3
PATIENCE = 20.0  # seconds
BATCHES = (1, 8, 32)
PREFILLS = (512, 2048)
VOCABULARY = 150_000


def main(model: str, started: str, engine_json: str = "{}") -> None:
    """Start an engine with random weights and time prefill and decode."""
    from vllm import LLM

    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2 << 30,
    }
    llm = LLM(model=model, **(engine | json.loads(engine_json)))
    generate(llm, 1, 16, 1)
    first_token = time.time() - float(started)
    generate(llm, 1, 32, 4)
    result = {"start to first token (s)": first_token}
    for length in PREFILLS:
        result[f"prefill {length} (tok/s)"] = length / median_seconds(llm, 1, length, 1)
    for batch in BATCHES:
        prompt_only = median_seconds(llm, batch, CONTEXT, 1)
        with_decode = median_seconds(llm, batch, CONTEXT, STEPS + 1)
        result[f"decode batch {batch} (ms/step)"] = (with_decode - prompt_only) / STEPS * 1e3
    result["peak memory of all processes (GiB)"] = peak_memory()
    print("RESULT " + json.dumps(result), flush=True)


def generate(llm: Any, batch: int, prompt_len: int, new_tokens: int) -> float:
    """Generate greedily for `batch` random prompts; return the seconds it took."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": random.choices(range(10, VOCABULARY), k=prompt_len)} for _ in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began


def median_seconds(llm: Any, batch: int, prompt_len: int, new_tokens: int) -> float:
    """Return the median of a few runs; of fewer where one takes long."""
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < PATIENCE:
        seconds.append(generate(llm, batch, prompt_len, new_tokens))
    return statistics.median(seconds)


def peak_memory() -> float:
    """Return the sum of the peak resident sizes of this process and its live children, in GiB."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue  # the process ended meanwhile
        if int(fields["PPid"]) in descendants():
            total += int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    return total / 2**30


def descendants() -> set[int]:
    """Return this process and every process below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
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
