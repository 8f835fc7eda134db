"""What an engine's core asks of its worker beside steps: a batch of nothing, and the drafts of the step before.

Engines of one rank hardly need either (replicas do that choose among experts, and grammars), so that both are asked here
between the steps of an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers

from npu_platform.demo import MODEL
from tests.support import drafters, models
from tests.support.stepped_run import Stepped, run_stepped

if TYPE_CHECKING:
    from pathlib import Path

RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
DRAFTS = 3
NEW = 8
# prefilled in chunks, and more than there are places for, so that a batch of nothing comes between all kinds of steps
PROMPTS = models.prompt_token_ids([1, 17, 40, 300, 2, 64])
ENGINE = drafters.ENGINE | {"enable_prefix_caching": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
KINDS = ("drafts", "states", "dense", "eager")
BY_DAY = ("drafts", "states")  # which have more to lose


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "V2":
        pytest.importorskip("triton")
    return name


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    llama, states = models.tiny_llama(folder / "llama"), models.tiny_granite_hybrid(folder / "states")
    drafters.eagle(folder / "eagle", llama)
    eagle = {"method": "eagle", "num_speculative_tokens": DRAFTS, "model": str(folder / "eagle")}
    return {
        "dense": {"model": str(llama)},
        "eager": {"model": str(llama), "enforce_eager": True},
        "drafts": {"model": str(llama), "speculative_config": eagle},
        "states": {"model": str(states)},
    }


@pytest.fixture(scope="module")
def between_steps(
    runner: str,
    settings: dict[str, dict[str, Any]],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[Stepped]]:
    """Rounds without and with batches of nothing, of the kinds that this session asks for."""
    items = [item for item in request.session.items if item.path == request.path]
    kinds = [kind for kind in KINDS if any(item.callspec.params.get("kind") == kind for item in items)]
    asked = {"prompts": PROMPTS, "sampling": {"temperature": 0.0, "max_tokens": NEW}}
    asked |= {"rounds": [None, "execute_dummy_batch", None]}
    scenarios = [{"engine": ENGINE | settings[kind], **asked} for kind in kinds]
    return dict(zip(kinds, run_stepped(tmp_path_factory.mktemp("runs"), scenarios, RUNNERS[runner]), strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in BY_DAY else pytest.mark.nightly) for kind in KINDS]
)
def test_a_batch_of_nothing_leaves_all_requests_as_they_are(
    kind: str, runner: str, between_steps: dict[str, list[Stepped]]
) -> None:
    before, during, after = between_steps[kind]
    assert during.runner == runner
    assert [len(tokens) for tokens in before.tokens] == [NEW] * len(PROMPTS)
    assert len(during.steps) > NEW
    assert all(step["launched"] > 0 for step in during.steps), "a batch of nothing ran nothing"
    assert during.tokens == before.tokens
    assert after.tokens == before.tokens


def test_drafts_that_are_taken_are_the_drafters(runner: str, tmp_path: Path) -> None:
    """With grammars, for which the scheduler has to know the drafts: the demo model's own, which knows of none."""
    words = transformers.AutoTokenizer.from_pretrained(MODEL)
    prompts = [words(text)["input_ids"] for text in ("A code: ", "A", "Another code, and a longer one: ")]
    matching = {"structured_outputs": {"regex": r"[a-f]{3} [0-9]{4}-(one|two|three)\."}}
    sampling = matching | {"temperature": 0.0, "max_tokens": 40, "ignore_eos": False, "detokenize": True}
    drafting = {"method": "draft_model", "num_speculative_tokens": DRAFTS, "model": str(MODEL)}
    engine = drafters.ENGINE | {"model": str(MODEL), "skip_tokenizer_init": False, "speculative_config": drafting}
    asked = {"prompts": prompts, "sampling": sampling, "rounds": ["take_draft_token_ids"]}
    [[said]] = run_stepped(tmp_path, [{"engine": engine, **asked}], RUNNERS[runner])
    assert said.runner == runner
    drafter, compared = drafters.draft_model(MODEL), 0
    for step in said.steps:
        drafts = dict(step["returned"] or [])
        for number, answer in step["answers"]:
            if answer != said.tokens[number]:  # a request that has ended needs none
                assert drafts[str(number)] == drafter([*prompts[number], *answer], DRAFTS)
                compared += 1
    assert compared >= 2 * len(prompts)
