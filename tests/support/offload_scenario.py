"""A script for any interpreter with vLLM: generates rounds of prompts and writes what came out as JSON.

``python offload_scenario.py scenario.json result.json``; the scenario holds ``engine`` (arguments of ``vllm.LLM``),
``rounds`` (lists of prompts, each a list of token ids), ``max_tokens`` and, optionally, ``abort`` (indices of rounds
whose requests are aborted after the first step).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(scenario_file: str, result_file: str) -> None:
    """Run one scenario in an engine of its own."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    scenario = json.loads(Path(scenario_file).read_text())
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **scenario["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=scenario["max_tokens"], detokenize=False, ignore_eos=True)
    rounds = []
    for number, prompts in enumerate(scenario["rounds"]):
        if number in scenario.get("abort", ()):
            rounds.append(_abort(llm, prompts, sampling))
            continue
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        rounds.append([{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs])
    result = {
        "platform": current_platform.device_type,
        "rounds": rounds,
        "metrics": {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
    }
    llm.llm_engine.engine_core.shutdown()
    Path(result_file).write_text(json.dumps(result))


def _abort(llm: Any, prompts: list[list[int]], sampling: Any) -> list[dict[str, Any]]:
    """Start requests and give them up while they run."""
    engine = llm.llm_engine
    names = [f"abort-{index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return []


if __name__ == "__main__":
    main(*sys.argv[1:])
