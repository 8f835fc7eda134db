"""What one engine shows of npu-kvconnector, in a process of its own: ``python -m tests.benchmarks.kvconnector_engine JSON``.

The JSON holds the arguments of :func:`run_engine`; the last line of the output is ``RESULT `` and what it returned.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["MIXED", "NEW_ANSWER", "NEW_PROMPTS", "NEW_TOKENS", "OURS", "in_a_process", "not_long", "run_engine"]

OURS = "NPUOffloadConnector"
NEW_PROMPTS, NEW_TOKENS, NEW_ANSWER = 8, 256, 16
MIXED = 24  # prompts that come back, among as many new ones
KNOWN = 20  # prompts before them
REPEATS, NEW_REPEATS = 3, 5
QUIET = 24  # steps of a request that is alone
LONGEST = 120.0  # seconds that storing may take after the last token
SETTLED = 2.0  # seconds without a byte written to a tier: all is stored
EXTRA = 1000  # tokens that the device's cache holds beside the longest prompt


class Engine:
    """One engine with a connector or none, and what is asked of it."""

    def __init__(
        self,
        model: str,
        extra: dict[str, Any] | None,
        longest: int,
        block_bytes: int,
        connector: str = OURS,
        engine: dict[str, Any] | None = None,
    ) -> None:
        """Start it.

        ``extra`` is the connector's configuration, ``block_bytes`` those of a token's keys and values, ``engine`` more
        arguments of ``vllm.LLM``.
        """
        from vllm import LLM

        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        cache = (longest + EXTRA) * block_bytes
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=longest + 64,
            kv_cache_memory_bytes=max(cache, NEW_PROMPTS * 2 * NEW_TOKENS * block_bytes),
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            disable_log_stats=False,
            **({} if extra is None else {"kv_transfer_config": transfer}),
            **(engine or {}),
        )
        self._names = itertools.count()

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[float, int]:
        """Generate; return the seconds and the tokens that the first prompt found cached."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        answers = self.llm.generate(asked, sampling(tokens), use_tqdm=False)
        return time.perf_counter() - began, answers[0].num_cached_tokens or 0

    def settle(self, known: float = math.inf) -> None:
        """Wait until the tiers have all that is to be stored: as many bytes as are known, or none more for some time."""
        before, since = -1.0, time.monotonic()
        until = since + LONGEST
        while time.monotonic() - since < SETTLED:
            if time.monotonic() > until:
                msg = f"bytes are still written after {LONGEST} s"
                raise RuntimeError(msg)
            self.ask([prompt_of(8, 1)], 1)  # less than a block: what is stored is told in a step
            written = self.written()
            if written >= known:
                return
            if written != before:
                before, since = written, time.monotonic()
            time.sleep(0.2)

    def written(self) -> float:
        """Return the bytes that the tiers have taken."""
        names = {"vllm:kv_offload_tiering_write_bytes", "vllm:kv_offload_store_bytes"}
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name in names)

    def gaps(self, loaded: list[int]) -> tuple[list[float], list[float]]:
        """Return the seconds between tokens of a request that is alone, and while another one's prompt is loaded."""
        engine = self.llm.llm_engine
        running, loading = (f"request-{next(self._names)}" for _ in range(2))
        engine.add_request(running, {"prompt_token_ids": prompt_of(8, 1)}, sampling(256))
        times: list[float] = []
        asked = 0
        while engine.has_unfinished_requests():
            names = {output.request_id for output in engine.step()}
            if running in names:
                times.append(time.perf_counter())
            if loading in names:
                break
            if not asked and len(times) == QUIET:
                asked = len(times)
                engine.add_request(loading, {"prompt_token_ids": loaded}, sampling(1))
        engine.abort_request([running])
        while engine.has_unfinished_requests():
            engine.step()
        gaps = [after - before for before, after in itertools.pairwise(times)]
        # The last step computes what is left of the loaded prompt: no load.
        return gaps[4 : asked - 1], gaps[asked - 1 : -1]


def sampling(tokens: int) -> Any:
    """Return the parameters of a request of so many greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def prompt_of(length: int, seed: int) -> list[int]:
    """Return the prompt of a seed."""
    import torch

    return torch.randint(3, 2000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_engine(
    *,
    model: str,
    extra: dict[str, Any] | None,
    lengths: list[int],
    longest: int,
    block_bytes: int,
    seed: int,
    parts: list[str],
    switch: str = "",
    connector: str = OURS,
    engine: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    """Measure one engine; return lists of seconds, or of seconds and the share of the prompt that was loaded.

    Args:
        model: a folder.
        extra: the connector's configuration, None without one.
        lengths: of the prompts that come back; prompt ``i`` is the same in each engine.
        longest: the most tokens that the engine is made for.
        block_bytes: bytes of a token's keys and values.
        seed: of the prompts that nobody has asked before.
        parts: of "new" (prompts that never come back), "computed", "host" (prompts that were computed here), "tier"
            (prompts that another engine has stored), "gaps" (between tokens of others meanwhile) and "mixed" (new
            prompts among some that were stored before).
        switch: a file to make between the two of "mixed": the tier misbehaves from then on.
        connector: its name.
        engine: more arguments of ``vllm.LLM``.
    """
    asked = Engine(model, extra, longest, block_bytes, connector, engine)
    fresh = itertools.count(10_000 * (seed + 1))

    def new_prompts() -> float:
        return asked.ask([prompt_of(NEW_TOKENS, next(fresh)) for _ in range(NEW_PROMPTS)], NEW_ANSWER)[0]

    new_prompts()  # warm
    found: dict[str, list[Any]] = {}
    if "new" in parts:
        found["new"] = [new_prompts() for _ in range(NEW_REPEATS)]
    for length in lengths:
        prompt = prompt_of(length, length)
        if "computed" in parts:
            found[f"computed {length}"] = [asked.ask([prompt], 1)[0]]
        for part in ("host", "tier"):
            if part in parts:
                found[f"{part} {length}"] = [hit(asked, prompt, part) for _ in range(REPEATS)]
    if "mixed" in parts:
        new = [prompt_of(NEW_TOKENS, next(fresh)) for _ in range(MIXED)]
        found["mixed"] = [measure_mixed(asked, new, switch, has_tiers=extra is not None)]
    if "gaps" in parts:
        length = not_long(lengths)[-1]
        found |= measure_gaps(asked, prompt_of(length, length), "tier" if "tier" in parts else "host")
    return found


def not_long(lengths: list[int]) -> list[int]:
    """Return the lengths that are computed in seconds."""
    return [length for length in lengths if length <= 8192] or lengths[:1]


def hit(engine: Engine, prompt: list[int], part: str) -> tuple[float, float]:
    """Return the seconds to the first token of a prompt that comes back, and the share of it that was loaded."""
    forget(engine, part)
    seconds, cached = engine.ask([prompt], 1)
    return seconds, cached / len(prompt)


def measure_gaps(engine: Engine, prompt: list[int], part: str) -> dict[str, list[float]]:
    """Return the seconds between tokens, with and without a load beside them."""
    engine.ask([prompt], 1)  # where it is not stored yet
    found: dict[str, list[float]] = {"quiet": [], "loading": []}
    for _ in range(REPEATS):
        forget(engine, part)
        quiet, loading = engine.gaps(prompt)
        found["quiet"] += quiet
        found["loading"] += loading
    return found


def measure_mixed(engine: Engine, new: list[list[int]], switch: str, *, has_tiers: bool) -> float:
    """Return the seconds for new prompts and as many that are in no tier but the last, which then misbehaves.

    Before that some short prompts are asked one at a time: the tier is known by what it answers.
    """
    old = [prompt_of(NEW_TOKENS, 1_000_000 + number) for number in range(len(new))]
    engine.ask(old, 1)
    forget(engine, "tier" if has_tiers else "host")
    for number in range(KNOWN):
        engine.ask([prompt_of(32, 2_000_000 + number)], 1)
    if switch:
        Path(switch).touch()
    return engine.ask([prompt for pair in zip(old, new, strict=True) for prompt in pair], NEW_ANSWER)[0]


def forget(engine: Engine, part: str) -> None:
    """Let the device forget all prompts, and the host too where they are to come from the tier behind it."""
    engine.settle()
    if not engine.llm.reset_prefix_cache(reset_connector=part == "tier"):
        msg = "the prefix cache could not be reset"
        raise RuntimeError(msg)


def in_a_process(**asked: Any) -> dict[str, list[Any]]:
    """Run one engine in a process of its own; return what :func:`run_engine` does."""
    import subprocess

    command = [sys.executable, "-m", "tests.benchmarks.kvconnector_engine", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        msg = f"an engine failed: {(done.stdout + done.stderr)[-3000:]}"
        raise RuntimeError(msg)
    answer: dict[str, list[Any]] = json.loads(results[-1].removeprefix("RESULT "))
    return answer


if __name__ == "__main__":
    print("RESULT " + json.dumps(run_engine(**json.loads(sys.argv[1]))))
