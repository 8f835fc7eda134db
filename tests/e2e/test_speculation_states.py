"""Speculation where layers keep a state: what goes on is the state after the last token that was accepted.

Drafts are those of a class that repeats, accepted by chance at each place with another rate, so that a step goes on from
any token of the step before; transformers must find the chosen tokens as likely.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import drafters, models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import assert_greedy, load, next_token_logprobs, sure_of_experts

if TYPE_CHECKING:
    from pathlib import Path

DRAFTS = 3
NEW = 1 + 3 * (DRAFTS + 1)
GREEDY = {"temperature": 0.0, "max_tokens": NEW, "logprobs": 1}
PROMPTS = models.prompt_token_ids([1, 4, 15, 17, 40, 300])  # one as long as a step with drafts
ECHO = {"method": "custom_class", "model": "tests.support.proposers.Echo", "num_speculative_tokens": DRAFTS}
SYNTHETIC = {"rejection_sample_method": "synthetic"}
BY_CHANCE = SYNTHETIC | {"synthetic_acceptance_rates": [0.8, 0.6, 0.4]}
ALL_ACCEPTED = SYNTHETIC | {"synthetic_acceptance_length": DRAFTS + 1.0}
TALKS = models.prompt_token_ids([290, 170], seed=2)
LONG = 150  # tokens, more than a block of any of these models holds
TIER = {"cpu_bytes_to_use": "256MiB", "offload_prompt_only": False}
OFFLOAD = {"kv_connector": "NPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": TIER}
FORGET = {"calls": [["reset_prefix_cache", {}]]}
HYBRIDS = ["granite_hybrid", "lfm2", "qwen3_next"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    made = {name: models.RECURRENT[name](folder / name) for name in HYBRIDS if name != "qwen3_next"}
    return made | {"qwen3_next": folder / "qwen3_next"}


@pytest.fixture(scope="module")
def head(targets: dict[str, Path]) -> drafters.Drafter:
    return drafters.qwen3_next_with_head(targets["qwen3_next"])


@pytest.fixture(scope="module")
def runs(
    targets: dict[str, Path], head: drafters.Drafter, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EngineRun]:
    mtp = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    cases = {name: (targets[name], ECHO | BY_CHANCE) for name in HYBRIDS}
    cases["mtp"] = targets["qwen3_next"], mtp
    cases["mtp-accepted"] = targets["qwen3_next"], mtp | ALL_ACCEPTED
    scenarios = [
        {
            "engine": {"model": str(target)} | drafters.ENGINE | {"speculative_config": speculation},
            "rounds": [{"prompts": PROMPTS, "sampling": GREEDY}],
        }
        for target, speculation in cases.values()
    ]
    return dict(zip(cases, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios), strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_accepted_tokens(name: str, targets: dict[str, Path], runs: dict[str, EngineRun]) -> None:
    run = runs[name]
    assert run.graphs_captured
    drafted, accepted = (run.metrics[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert 0.2 < accepted / drafted < 0.9
    for prompt, output in zip(PROMPTS, run.rounds[0], strict=True):
        logprobs = next_token_logprobs(load(targets[name]), prompt, output["tokens"])
        expected = logprobs.gather(1, torch.tensor(output["tokens"])[:, None])[:, 0]
        sure = sure_of_experts(load(targets[name]), prompt, output["tokens"])
        assert sure.sum() >= NEW - 2
        torch.testing.assert_close(torch.tensor(output["logprobs"])[sure], expected[sure], atol=2e-3, rtol=0)


def test_a_head_for_gated_delta_nets(
    targets: dict[str, Path], head: drafters.Drafter, runs: dict[str, EngineRun]
) -> None:
    target = targets["qwen3_next"]
    for prompt, output in zip(PROMPTS, runs["mtp"].tokens(0), strict=True):
        assert_greedy(load(target), prompt, output)
    for prompt, output in zip(PROMPTS, runs["mtp-accepted"].tokens(0), strict=True):
        drafters.assert_drafted(target, head, prompt, output, DRAFTS)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_head_reads_on_where_a_part_of_a_prompt_ends(
    runner: str, targets: dict[str, Path], head: drafters.Drafter, tmp_path: Path
) -> None:
    """The prompts of 40 and of 300 tokens are computed in parts; what the head keeps of their ends tells in its drafts."""
    mtp = {"method": "mtp", "num_speculative_tokens": DRAFTS} | ALL_ACCEPTED
    parts = {"max_num_batched_tokens": 32, "enable_prefix_caching": False}
    engine = drafters.ENGINE | parts | {"model": str(targets["qwen3_next"]), "speculative_config": mtp}
    scenario = {"engine": engine, "rounds": [{"prompts": PROMPTS, "sampling": GREEDY}]}
    (run,) = run_scenarios(tmp_path, [scenario], {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))})
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        drafters.assert_drafted(targets["qwen3_next"], head, prompt, output, DRAFTS)


@dataclass(frozen=True)
class Talks:
    """What engines with drafts and a prefix cache are asked, after what they draft, and what plain ones said to it."""

    engines: list[dict[str, Any]]
    rounds: list[list[dict[str, Any]]]
    environ: dict[str, str]
    expected: list[EngineRun]


@pytest.fixture(scope="module")
def talks(targets: dict[str, Path], head: drafters.Drafter, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """Long answers, and the same conversations going on, of engines with neither drafts nor a prefix cache."""
    assert head is not None, "which comes with one of the models"
    folder = tmp_path_factory.mktemp("talks")
    known = {"method": "custom_class", "model": "tests.support.proposers.Known", "num_speculative_tokens": DRAFTS}
    sampling = {"temperature": 0.0, "max_tokens": LONG}
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 64}
    engines = [drafters.ENGINE | sizes | {"model": str(targets[name])} for name in HYBRIDS]
    plain = [engine | {"enable_prefix_caching": False} for engine in engines]
    rounds = [[{"prompts": TALKS, "sampling": sampling}] for _ in HYBRIDS]
    first = run_scenarios(folder / "first", scenarios_of(plain, rounds))
    for one, run in zip(rounds, first, strict=True):
        one.append({"prompts": [[*text, 7, 9] for text in texts_of(TALKS, run.tokens(0))], "sampling": sampling})
    expected = run_scenarios(folder / "expected", scenarios_of(plain, rounds))
    texts = [
        text
        for one, run in zip(rounds, expected, strict=True)
        for number, asked in enumerate(one)
        for text in texts_of(asked["prompts"], run.tokens(number))
    ]
    (folder / "texts.json").write_text(json.dumps(texts))
    both = [engine | {"speculative_config": known, "enable_prefix_caching": True} for engine in engines]
    return Talks(both, rounds, {"KNOWN_TEXTS": str(folder / "texts.json")}, expected)


@pytest.fixture(scope="module")
def cached(talks: Talks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EngineRun, EngineRun]]:
    """The plain engines' answers, and those with both."""
    found = run_scenarios(tmp_path_factory.mktemp("cached"), scenarios_of(talks.engines, talks.rounds), talks.environ)
    return dict(zip(HYBRIDS, zip(talks.expected, found, strict=True), strict=True))


@pytest.fixture(scope="module")
def offloaded(talks: Talks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EngineRun, EngineRun]]:
    """The plain engines' answers, and those with both that forget, between the talks, what is not on the host."""
    engines = [engine | {"kv_transfer_config": OFFLOAD} for engine in talks.engines]
    scenarios = scenarios_of(engines, [[one, FORGET, other] for one, other in talks.rounds])
    found = run_scenarios(tmp_path_factory.mktemp("offloaded"), scenarios, talks.environ)
    return dict(zip(HYBRIDS, zip(talks.expected, found, strict=True), strict=True))


def scenarios_of(engines: list[dict[str, Any]], rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"engine": engine, "rounds": asked} for engine, asked in zip(engines, rounds, strict=True)]


def texts_of(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_prefixes_are_cached_with_drafts(name: str, cached: dict[str, tuple[EngineRun, EngineRun]]) -> None:
    """The state of the last accepted token goes on in the next block, and prompts are found as without drafts."""
    plain, both = cached[name]
    assert both.metrics["vllm:spec_decode_num_accepted_tokens"] > LONG
    assert [both.tokens(number) for number in (0, 1)] == [plain.tokens(number) for number in (0, 1)]
    assert min(output["cached"] for output in both.rounds[1]) > 0
    assert max(output["cached"] for output in plain.rounds[1]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_prefixes_come_back_from_the_host_with_drafts(
    name: str, offloaded: dict[str, tuple[EngineRun, EngineRun]]
) -> None:
    plain, both = offloaded[name]
    assert both.metrics["vllm:spec_decode_num_accepted_tokens"] > LONG
    assert [both.tokens(number) for number in (0, 2)] == [plain.tokens(number) for number in (0, 1)]
    assert min(output["cached"] for output in both.rounds[2]) > 0
    assert both.metrics["vllm:kv_offload_load_bytes"] > 0
