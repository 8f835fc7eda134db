"""An engine that somebody kills: it answers prompts and notes what it has answered and stored.

``python -m tests.support.killed_engine scenario.json ANSWERS``; the scenario holds ``engine`` (arguments of ``vllm.LLM``),
``prompts`` (lists of token ids), ``max_tokens`` and ``seed``. With a seed it asks for one to four prompts at a time, any of
them, and goes on until it is killed; without one, for each alone, in order. ANSWERS gets a line of JSON a batch: the
numbers of its prompts, their tokens, how many tokens of each were cached, and whether all blocks so far are stored.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.engine_run import look_at, settle

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 4
"""Prompts of a batch."""


def main(scenario_file: str, answers_file: str) -> None:
    """Run one engine."""
    from vllm import LLM, SamplingParams

    scenario = json.loads(Path(scenario_file).read_text())
    look_at(Path(scenario["engine"]["model"]))
    llm = LLM(skip_tokenizer_init=True, **scenario["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=scenario["max_tokens"], detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in scenario["prompts"]]
    with Path(answers_file).open("a", buffering=1) as answers:
        for numbers, settles in batches(len(prompts), scenario.get("seed")):
            outputs = llm.generate([prompts[number] for number in numbers], sampling, use_tqdm=False)
            if settles:
                settle(llm)
            answers.write(json.dumps(line(numbers, outputs, settles)) + "\n")
    llm.llm_engine.engine_core.shutdown()


def batches(count: int, seed: int | None) -> Iterator[tuple[list[int], bool]]:
    """Yield the prompts of each batch, and whether to wait until their blocks are stored."""
    if seed is None:
        yield from (([number], True) for number in range(count))  # so that blocks are stored in the prompts' order
        return
    chance = random.Random(seed)
    while True:
        yield chance.sample(range(count), chance.randint(1, MOST)), chance.random() < 0.5


def line(numbers: list[int], outputs: list[Any], is_stored: bool) -> dict[str, Any]:
    """Return what is noted of a batch."""
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    cached = [output.num_cached_tokens for output in outputs]
    return {"numbers": numbers, "tokens": tokens, "cached": cached, "is_stored": is_stored}


if __name__ == "__main__":
    main(*sys.argv[1:])
