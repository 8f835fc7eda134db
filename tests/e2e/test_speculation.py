"""Speculation changes no greedy token, whoever drafts; and each drafter drafts what it should.

The second is seen where an engine accepts every draft (synthetic acceptance): its tokens are then the drafts, and the
target's choice after them, which also is right only if the caches are.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest
from vllm.config.speculative import SpeculativeMethod

from tests.support import adapters, drafters, models
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.transformers_reference import assert_greedy, load

if TYPE_CHECKING:
    from pathlib import Path

DRAFTS = 3
NEW = 1 + 2 * (DRAFTS + 1)
GREEDY = {"temperature": 0.0, "max_tokens": NEW}
PROMPTS = models.prompt_token_ids([1, 2, 15, 16, 17, 40, 300])
ENGINE = drafters.ENGINE | {"enable_prefix_caching": True}
ALL_ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": DRAFTS + 1.0}
RATES = [1.0, 0.5, 0.0]
MASKED = 2
METHODS = ["draft_model", "eagle", "eagle3", "medusa", "mtp", "custom_class"]
if "medusa" not in get_args(SpeculativeMethod):  # vLLM 0.33 has dropped it
    METHODS.remove("medusa")
IN_GRAPHS = {"V1": ("draft_model", "eagle", "eagle3"), "V2": ("eagle", "eagle3", "mtp")}  # whose drafts are replayed
BY_DAY = ("draft_model", "eagle")  # of those whose drafts are hardly ever accepted
BY_NIGHT = ("medusa", "parallel eagle3")  # what both of the last have by themselves is drafted by day


@dataclass(frozen=True)
class Made:
    """A target and who drafts for it."""

    target: Path
    drafter: drafters.Drafter
    config: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("drafters")
    llama = models.tiny_llama(folder / "llama")
    other = models.tiny_llama(folder / "other", seed=1, num_hidden_layers=2)
    wide = models.tiny_llama(folder / "wide", seed=2, num_hidden_layers=2, pard_token=MASKED)
    found: dict[str, tuple[Path, Path | str | None, drafters.Drafter]] = {
        "draft_model": (llama, other, drafters.draft_model(other)),
        "eagle": (llama, folder / "eagle", drafters.eagle(folder / "eagle", llama)),
        "eagle3": (llama, folder / "eagle3", drafters.eagle3(folder / "eagle3", llama)),
        "medusa": (llama, folder / "medusa", drafters.medusa(folder / "medusa", llama, DRAFTS)),
        "mtp": (folder / "deepseek", None, drafters.deepseek_with_head(folder / "deepseek")),
        "custom_class": (llama, "tests.support.proposers.Echo", lambda tokens, number: tokens[-number:]),
        "parallel": (llama, wide, drafters.parallel(wide, MASKED)),
        "parallel eagle3": (llama, folder / "at-once", drafters.eagle3(folder / "at-once", llama, masked=MASKED)),
    }
    return {
        method: Made(
            target,
            drafter,
            {"num_speculative_tokens": DRAFTS}
            | ({} if head is None else {"model": str(head)})
            | ({"method": "draft_model"} if method == "parallel" else {"method": method.removeprefix("parallel ")})
            | ({"parallel_drafting": True} if method.startswith("parallel") else {}),
        )
        for method, (target, head, drafter) in found.items()
    }


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EngineRun]:
    """The cases that this session asks for; each twice, the second time from the prefix cache.

    A case is a method, as it is or with all drafts accepted, or "rates", which are accepted by chance.
    """
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
    cases = {"rates": engine(made["custom_class"], rates)}
    for item in request.session.items:
        if item.path == request.path and "case" in getattr(item, "callspec", SimpleNamespace(params={})).params:
            case = item.callspec.params["case"]
            method, _, accepted = case.partition("-")
            cases[case] = engine(made[method], ALL_ACCEPTED if accepted else {})
    rounds = [{"prompts": PROMPTS, "sampling": GREEDY}] * 2
    scenarios = [{"engine": settings, "rounds": rounds} for settings in cases.values()]
    return dict(zip(cases, run_scenarios(tmp_path_factory.mktemp("runs"), scenarios), strict=True))


def engine(who: Made, more: dict[str, Any]) -> dict[str, Any]:
    return {"model": str(who.target), "speculative_config": who.config | more} | ENGINE


def graphs(case: str, runner: str) -> int:
    """Return how many there are: the target's, and those of who drafts, which on V2 are more for tokens after the first.

    Such a step has one token of each request.
    """
    sizes: list[int] = ENGINE["cudagraph_capture_sizes"]
    if case not in IN_GRAPHS[runner]:
        return len(sizes)
    later = [size for size in sizes if size <= ENGINE["max_num_seqs"]] if runner == "V2" else []
    return 2 * len(sizes) + len(later)


@pytest.mark.parametrize(
    "case", [pytest.param(method, marks=[] if method in BY_DAY else pytest.mark.nightly) for method in METHODS]
)
def test_greedy_tokens_are_the_targets(case: str, made: dict[str, Made], runs: dict[str, EngineRun]) -> None:
    run = runs[case]
    assert run.platform == "npu"
    assert run.graphs_captured == graphs(case, run.runner)
    assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert len(output) == NEW
        assert_greedy(load(made[case].target), prompt, output)
    assert max(output["cached"] for output in run.rounds[1]) > 0
    assert run.tokens(1) == run.tokens(0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(f"{method}-accepted", marks=pytest.mark.nightly if method in BY_NIGHT else [])
        for method in (*METHODS, "parallel", "parallel eagle3")
    ],
)
def test_drafts_are_the_drafters(case: str, made: dict[str, Made], runs: dict[str, EngineRun]) -> None:
    run, who = runs[case], made[case.removesuffix("-accepted")]
    drafted = run.metrics["vllm:spec_decode_num_draft_tokens"]
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > 0.5 * drafted
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        drafters.assert_drafted(who.target, who.drafter, prompt, output, DRAFTS)
    assert run.tokens(1) == run.tokens(0)


def test_statistics_of_acceptance(runs: dict[str, EngineRun]) -> None:
    """The first draft is always accepted, the second half of the times, the third never.

    But for the few that vLLM adds where one token of a prompt is left, so that the batch is uniform: they are no tokens.
    """
    drafted = {name: value for name, value in runs["rates"].metrics.items() if "spec_decode" in name}
    places = [drafted[f"vllm:spec_decode_num_accepted_tokens_per_pos[{place}]"] for place in range(DRAFTS)]
    assert 0.9 * drafted["vllm:spec_decode_num_drafts"] < places[0] <= drafted["vllm:spec_decode_num_drafts"]
    assert places[0] > places[1] > places[2] == 0
    assert sum(places) == drafted["vllm:spec_decode_num_accepted_tokens"]
    assert drafted["vllm:spec_decode_num_draft_tokens"] <= DRAFTS * drafted["vllm:spec_decode_num_drafts"]


def test_suffixes(made: dict[str, Made], tmp_path: Path) -> None:
    """An answer that has been given once is found in the tree of all answers."""
    pytest.importorskip(
        "arctic_inference", reason="the extra suffix is not installed: its build takes a torch of its own"
    )
    target = made["custom_class"].target
    settings = {"method": "suffix", "num_speculative_tokens": DRAFTS, "suffix_decoding_max_tree_depth": 16}
    engine = {"model": str(target), "speculative_config": settings} | ENGINE
    (run,) = run_scenarios(tmp_path, [{"engine": engine, "rounds": [{"prompts": PROMPTS, "sampling": GREEDY}] * 2}])
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > len(PROMPTS)
    for prompt, output in zip(PROMPTS, run.tokens(0), strict=True):
        assert_greedy(load(target), prompt, output)
    assert run.tokens(1) == run.tokens(0)


@pytest.mark.nightly
@pytest.mark.parametrize("beside", ["grammars", "adapters", "ranks"])
@pytest.mark.parametrize("method", [method for method in METHODS if method not in BY_DAY])
def test_beside_what_changes_what_is_said(method: str, beside: str, made: dict[str, Made], tmp_path: Path) -> None:
    """Who drafts knows of no grammar and of no adapter; of the others test_speculation_combined.py asks more."""
    who = made[method]
    asked: dict[str, Any] = {"prompts": PROMPTS, "sampling": GREEDY}
    more: dict[str, Any] = {}
    if beside == "grammars":
        models.with_tokenizer(who.target)
        kinds = [{"structured_outputs": {"regex": r"(w[1-4][0-9]*)+"}}, {}]
        asked["sampling"] = [GREEDY | kinds[number % 2] for number in range(len(PROMPTS))]
        more = {"skip_tokenizer_init": False}
    elif beside == "adapters":
        folder = str(adapters.adapter(tmp_path / "adapter", load(who.target), ["o_proj"], 8, seed=1))
        asked["lora"] = [folder if number % 2 else None for number in range(len(PROMPTS))]
        more = {"enable_lora": True, "max_loras": 2}
    else:
        more = {"tensor_parallel_size": 2}
    plain = {"model": str(who.target)} | ENGINE | more
    scenarios = [
        {"engine": plain | settings, "rounds": [asked]} for settings in ({}, {"speculative_config": who.config})
    ]
    environ = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "2GiB"} if beside == "ranks" else {}
    expected, drafted = run_scenarios(tmp_path, scenarios, environ)
    assert drafted.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert drafted.tokens(0) == expected.tokens(0)
