"""How late blocks are durable beside a busy engine: the part "late" of ``tests.benchmarks.kvconnector``.

An engine with the durable tier is asked new prompts without a pause, eight at a time, and the tier's own histogram says how
long after it was handed a block that was durable. As a program, ``python -m tests.benchmarks.kvconnector_late JSON`` is that
engine, whose JSON holds the arguments of :func:`run_busy`; a line of its output is ``RESULT `` and what it returned.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import Any

from tests.benchmarks.kvconnector_engine import NEW_PROMPTS, Engine, prompt_of, sampling

__all__ = ["delays"]

PROMPTS = {256: 64, 1024: 8}
"""Tokens of a prompt, and of its answer."""
SECONDS = 40.0
BOUNDS = ("0.25", "0.5", "0.75", "1.0", "2.0")
DELAY = "vllm:npu_kv_durable_delay_seconds"
RESULT = "RESULT "


def delays(model: str, tier: dict[str, Any], token_bytes: int, options: dict[str, Any]) -> str:
    """Return the table.

    Args:
        model: its folder.
        tier: the durable tier's options.
        token_bytes: bytes of a token's keys and values.
        options: more arguments of ``vllm.LLM``.
    """
    within = " | ".join(f"within {bound} s" for bound in BOUNDS)
    rows = [f"| prompts, answers | tokens/s | blocks | {within} | later |", "|---" * (4 + len(BOUNDS)) + "|"]
    for tokens, answer in PROMPTS.items():
        asked = {"model": model, "tier": tier, "token_bytes": token_bytes, "options": options}
        command = [sys.executable, "-m", "tests.benchmarks.kvconnector_late"]
        command.append(json.dumps(asked | {"tokens": tokens, "answer": answer}))
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(RESULT))  # vLLM logs after it, too
        found = json.loads(line.removeprefix(RESULT))
        counts = [found["buckets"][bound] for bound in BOUNDS]
        cells = [f"{tokens}, {answer}", f"{found['rate']:.0f}", *map(str, [found["count"], *counts])]
        rows.append(f"| {' | '.join(cells)} | {found['count'] - counts[-1]} |")
    return "\n".join(rows)


def run_busy(
    *, model: str, tier: dict[str, Any], token_bytes: int, options: dict[str, Any], tokens: int, answer: int
) -> dict[str, Any]:
    """Be the engine; return its rate and the tier's histogram."""
    host = 4 * NEW_PROMPTS * (tokens + answer) * token_bytes
    extra = {"cpu_bytes_to_use": host, "secondary_tiers": [tier]}
    engine = Engine(model, extra, 2 * NEW_PROMPTS * (tokens + answer), token_bytes, engine=options)
    seeds, running, done = itertools.count(time.time_ns() % 2**40), set[str](), 0
    engine.ask([prompt_of(tokens, next(seeds))], 2)  # warm
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        while len(running) < NEW_PROMPTS:
            name = str(next(seeds))
            running.add(name)
            prompt = {"prompt_token_ids": prompt_of(tokens, int(name))}
            engine.llm.llm_engine.add_request(name, prompt, sampling(answer))
        for output in engine.llm.llm_engine.step():
            if output.finished:
                running.discard(output.request_id)
                done += 1
    took = time.monotonic() - began
    (histogram,) = (metric for metric in engine.llm.get_metrics() if metric.name == DELAY)
    return {"rate": done * (tokens + answer) / took, "count": histogram.count, "buckets": histogram.buckets}


if __name__ == "__main__":
    print(f"{RESULT}{json.dumps(run_busy(**json.loads(sys.argv[1])))}")
