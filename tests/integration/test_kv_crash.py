"""Engines that are killed while their durable tier stores: the next ones load what is whole, and its tokens are equal."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import models
from tests.support.offload_engine import Case, environment, run_scenario, write_scenario
from tests.support.vllm_process import PASSIVE, start_module

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, NEW = 120, 8
KILLS, FRESH, AGAIN = 30, 150, 15
"""Engines, prompts that each begins with nobody has asked before, and prompts of those before it that it is asked first."""
LONGEST = 1.0  # seconds of stores before a kill


def start_and_kill(case: Case, folder: Path, rounds: list[Any], seconds: float) -> list[dict[str, Any]]:
    """Kill an engine so long after its first store; return its answers until then, one a round."""
    scenario, answers = write_scenario(case, folder, rounds, max_tokens=NEW), folder / "answers"
    answers.write_text("")
    before = segments(folder)
    with (folder / "output").open("w+b") as output:
        arguments = (str(scenario), str(folder / "result.json"), str(answers))
        environ = os.environ | PASSIVE | environment(case)
        engine = start_module("tests.support.offload_scenario", *arguments, environ=environ, output=output)
        until = time.monotonic() + 120
        while segments(folder) <= before:
            time.sleep(0.002)
            assert time.monotonic() < until, (folder / "output").read_text()[-4000:]
        time.sleep(seconds)
        engine.kill()
        assert engine.wait() == -signal.SIGKILL, (folder / "output").read_text()[-4000:]
    whole_lines = answers.read_text().split("\n")[:-1]
    return [json.loads(line)[0] for line in whole_lines]


def segments(folder: Path) -> set[str]:
    """Return the files of blocks; a writer begins one of its own."""
    return {path.name for path in folder.glob("tier/segments/*.seg")}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_engines_killed_while_they_store_never_load_a_wrong_token(tmp_path: Path) -> None:
    chance, case = random.Random(1), Case(model="llama", tier={"type": "durable", "bytes": 512 << 20})
    prompts = models.prompt_token_ids([PROMPT] * (KILLS * FRESH), seed=8)
    answers: dict[int, list[int]] = {}
    loaded, asked_again = list[int](), 0
    for kill in range(KILLS):
        again = chance.sample(sorted(answers), min(AGAIN, len(answers)))
        asked = [*again, *range(kill * FRESH, (kill + 1) * FRESH)]
        rounds = [[prompts[number]] for number in asked]
        found = start_and_kill(case, tmp_path, rounds, chance.uniform(0.0, LONGEST))
        assert len(found) < len(asked), "it had ended before"
        asked_again += min(len(again), len(found))
        for number, answer in zip(asked, found, strict=False):
            loaded += [number] if answer["cached"] else []
            assert answers.setdefault(number, answer["tokens"]) == answer["tokens"]
    print({"kills": KILLS, "answers": len(answers), "asked again": asked_again, "loaded": len(loaded)})
    assert len(loaded) > asked_again // 2
    computed = run_scenario(
        Case(model="llama"), tmp_path, [[prompts[number]] for number in loaded], connector=False, max_tokens=NEW
    )
    assert [one[0]["tokens"] for one in computed["rounds"]] == [answers[number] for number in loaded]
