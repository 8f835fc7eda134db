"""One turn of the benchmark of features, run by its own interpreter: prints one JSON line.

``python -m tests.benchmarks.features_contestant TURN_JSON``: the turn has ``model``, ``engine`` (arguments of vllm.LLM) and
what is asked: ``cases`` (kind, context, batch and samples of each, timed as the engine's benchmark does), with the folders
of ``adapters`` that sequences take in turn; or ``prompts`` (lists of token ids), answered one after the other to their end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.engine_cases import Case
from tests.benchmarks.engine_contestant import FILLS, Timer, engine_for

ANSWER = 96  # tokens at most
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


def main(turn_json: str) -> None:
    """Start an engine, ask it and say what came of it."""
    turn = json.loads(turn_json)
    said = answered(turn) if "prompts" in turn else timed(turn)
    print("RESULT " + json.dumps(said), flush=True)


def timed(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each case's samples, by its name."""
    cases = [Case(**case) for case in turn["cases"]]
    shape = json.loads((Path(turn["model"]) / "config.json").read_text())
    filled = {"kv_transfer_config": FILLS} if all(case.filled for case in cases) else {}
    llm = engine_for(cases, turn["model"], shape, turn["engine"] | filled)
    timer = Timer(llm.llm_engine, shape["vocab_size"], loaded(turn.get("adapters", [])))
    timer.run(1, 16, 1)
    return {"seconds": {case.name: timer.measured(case) for case in cases}}


def loaded(folders: list[str]) -> list[Any]:
    """Return what asks for each adapter."""
    from vllm.lora.request import LoRARequest

    return [LoRARequest(Path(folder).name, number, folder) for number, folder in enumerate(folders, 1)]


def answered(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens a second of answers one after the other, and the share of drafts that were accepted."""
    from vllm import LLM, SamplingParams

    prompts = turn["prompts"]
    room = max(map(len, prompts)) + ANSWER + 32
    llm = LLM(turn["model"], disable_log_stats=False, max_model_len=room, max_num_seqs=4, **turn["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, detokenize=False)
    llm.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)  # not counted
    before, began, tokens = counts(llm), time.perf_counter(), 0
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - began
    drafted, accepted = (after - old for after, old in zip(counts(llm), before, strict=True))
    return {"tokens/s": tokens / seconds, "tokens": tokens, "accepted": accepted / drafted if drafted else None}


def counts(llm: Any) -> tuple[float, float]:
    """Return how many tokens were drafted and accepted so far."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return found.get(DRAFTED, 0.0), found.get(ACCEPTED, 0.0)


if __name__ == "__main__":
    random.seed(0)
    main(*sys.argv[1:])
