"""Steps engines by hand in a process of their own, and lets their workers be asked something between two steps.

``run_stepped`` is for tests; the module's main is the process: ``python -m tests.support.stepped_run scenarios.json result.json``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.vllm_process import run_module

__all__ = ["Stepped", "run_stepped"]


@dataclass(frozen=True)
class Stepped:
    """What an engine said in one round.

    `tokens` by prompt. `steps`: for each step, how many kernels the worker's call behind it launched, what it returned,
    and by prompt the `answers` so far of those that had an answer in this step.
    """

    runner: str
    tokens: list[list[int]]
    steps: list[dict[str, Any]]


def run_stepped(
    folder: Path, scenarios: list[dict[str, Any]], environ: dict[str, str] | None = None
) -> list[list[Stepped]]:
    """Run engines, for each its rounds.

    A scenario is ``{"engine": {"model": ...}, "prompts": [[id]], "sampling": {...}, "rounds": [...]}``; a round is the name
    of a worker's method that is called behind each step, or None. Before each round the prefix cache is emptied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scenario, result = folder / "stepped.json", folder / "stepped-result.json"
    scenario.write_text(json.dumps(scenarios))
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "NPU_SIMULATOR_MEMORY": "4GiB"}
    done = run_module("tests.support.stepped_run", scenario, result, **defaults | (environ or {}))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [[Stepped(**one) for one in rounds] for rounds in json.loads(result.read_text())]


def main(scenario_file: str, result_file: str) -> None:
    """Run the scenarios."""
    results = [_scenario(**scenario) for scenario in json.loads(Path(scenario_file).read_text())]
    Path(result_file).write_text(json.dumps(results))


def _scenario(
    engine: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any], rounds: list[str | None]
) -> list[dict[str, Any]]:
    from vllm import LLM

    from tests.support.engine_run import look_at

    look_at(Path(engine["model"]))
    llm = LLM(**{"skip_tokenizer_init": True} | engine)
    runner = "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    said = [{"runner": runner, **_round(llm, prompts, sampling, method)} for method in rounds]
    llm.llm_engine.engine_core.shutdown()
    return said


def _round(llm: Any, prompts: list[list[int]], sampling: dict[str, Any], method: str | None) -> dict[str, Any]:
    import torch

    from tests.support.engine_run import parameters

    engine = llm.llm_engine
    assert llm.reset_prefix_cache()
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": ids}, parameters(sampling))
    tokens: dict[int, list[int]] = {}
    steps = []
    while engine.has_unfinished_requests():
        answers = {int(output.request_id): list(output.outputs[0].token_ids) for output in engine.step()}
        tokens |= answers
        if method is not None:
            torch.accelerator.synchronize()
            before = torch.npu.launch_counts()[0]
            [returned] = llm.collective_rpc(method)
            torch.accelerator.synchronize()
            launched = torch.npu.launch_counts()[0] - before
            steps.append({"launched": launched, "returned": _plain(returned), "answers": sorted(answers.items())})
    return {"tokens": [tokens[number] for number in range(len(prompts))], "steps": steps}


def _plain(returned: Any) -> Any:
    """Return drafts as pairs of a prompt's number, as text, and its drafts; the engine's own ids go on behind a hyphen."""
    if returned is None:
        return None
    drafts = zip(returned.req_ids, returned.draft_token_ids, strict=True)
    return [[name.partition("-")[0], tokens] for name, tokens in drafts]


if __name__ == "__main__":
    main(*sys.argv[1:])
