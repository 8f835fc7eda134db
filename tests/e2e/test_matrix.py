"""Every two features that vLLM allows together say what the eager engine without them says, in bfloat16 and exactly.

`nox -s matrix` runs all rows and writes docs/reference/features.md from what they gave; CI runs one, chosen by the commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import features, matrix_page, pairs
from tests.support.engine_run import EngineRun, run_scenarios
from tests.support.environments import ROOT
from tests.support.features import DIMENSIONS, Apart, Workshop, baseline, name_of
from tests.support.nearness import Nearness, between

if TYPE_CHECKING:
    from tests.support.pairs import Row

ROWS = {name_of(row): row for row in features.rows()}
RESULTS = os.environ.get("NPU_MATRIX_RESULTS")
"""A folder for what each row gave; a row that is there is not run again."""
# An engine's logprobs may be as far from the baseline's as the baseline in bfloat16 is from itself in a wider dtype.
ALLOWED = {"float32": 0.02, "bfloat16": 1.5}
# Where activations or the cache are rounded, and once more where both are: a value that noise moves by a step moves others,
# a rank rounds its part of the activations by its own scale, and a later chunk of latents sees the earlier ones rounded.
ROUNDED = 1.0
WIDEST = 8.0  # of a token that is another one, in the same measure


def of_today() -> str:
    """Return the row that this commit chooses among those of one feature on one device, which take seconds."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    short = [name for name, row in ROWS.items() if name.count(",") == 1 and row["ranks"] == "one device"]
    return short[zlib.crc32(done.stdout.encode()) % len(short)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def baselines(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what gives a row's baseline, which it shares with others, in each of its dtypes."""
    known: dict[str, dict[str, EngineRun]] = {}

    def of(row: Row) -> dict[str, EngineRun]:
        name = name_of(baseline(row))
        if name not in known:
            known[name] = run(workshop, baseline(row), row, tmp_path_factory.mktemp("baseline"))
        return known[name]

    return of


def run(workshop: Workshop, row: Row, asked: Row, folder: Path) -> dict[str, EngineRun]:
    """Ask an engine for each dtype the same."""
    rounds = [one for one in workshop.rounds(asked) if row is asked or "calls" not in one]
    rounds = [one for one in rounds if one.get("calls") != []]
    scenarios = [{"engine": workshop.engine(row, dtype), "rounds": rounds} for dtype in ALLOWED]
    return dict(zip(ALLOWED, run_scenarios(folder, scenarios, workshop.environ(row)), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=[] if name == of_today() else [pytest.mark.nightly]) for name in ROWS]
)
def test_row(name: str, workshop: Workshop, baselines: Any, tmp_path: Path) -> None:
    if RESULTS and result_of(name).exists():
        pytest.skip("it passed in a run before this one")
    row = ROWS[name]
    expected, found = baselines(row), run(workshop, row, row, tmp_path)
    noise = compared(expected["float32"], expected["bfloat16"]).typical
    assert noise > 0
    near = {dtype: compared(expected[dtype], found[dtype]) for dtype in ALLOWED}
    roundings = ("W8A8" in row["weights"]) + (row["cache"] != "cache as it is")
    for dtype, one in near.items():
        limit = max(ALLOWED[dtype], ROUNDED * roundings) * noise
        assert one.typical <= limit, f"{dtype}: {one}, noise {noise}"
        assert one.widest <= WIDEST * limit, f"{dtype}: {one}, noise {noise}"
    assert_used(row, found["bfloat16"])
    keep(name, row, noise, near, found["bfloat16"].runner)


def compared(one: EngineRun, other: EngineRun) -> Nearness:
    """Compare all rounds."""
    first, second = ([output for outputs in each.rounds for output in outputs] for each in (one, other))
    return between(first, second)


def assert_used(row: Row, run: EngineRun) -> None:
    """Assert that features did something, where an engine tells."""
    assert run.platform == "npu"
    if row["speculation"] != "no drafts":
        assert run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    cached = max(output["cached"] for output in run.rounds[-1])
    # a sleep empties both caches, and these models' blocks may be longer than their prompts
    if row["memory"] == "always awake" and row["model"] not in ("images", "states"):
        assert (cached > 0) == (row["tiers"] == "KV offload" or row["prefixes"] == "prefix caching")
    if row["ranks"] == "one device":
        assert (run.graphs_captured > 0) == (row["graphs"] != "eager")


def keep(name: str, row: Row, noise: float, near: dict[str, Nearness], runner: str) -> None:
    """Write what a row gave that passed, for the page."""
    if RESULTS:
        Path(RESULTS).mkdir(parents=True, exist_ok=True)
        apart = {dtype: asdict(one) for dtype, one in near.items()}
        result = {"row": row, "runner": runner, "noise": noise, "near": apart}
        result_of(name).write_text(json.dumps(result))


def result_of(name: str) -> Path:
    """Return the file of a row that passed."""
    return Path(RESULTS or "") / f"{zlib.crc32(name.encode()):08x}.json"


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [pytest.param(one, id=one.why) for one in features.APART if one.said])
def test_what_is_refused_together_is_refused_at_start(apart: Apart, workshop: Workshop, tmp_path: Path) -> None:
    row = features.refused(apart)
    with pytest.raises(AssertionError, match=apart.said):
        run(workshop, row, row, tmp_path)


def test_every_pair_that_goes_together_has_a_row() -> None:
    dimensions = {name: list(choices) for name, choices in DIMENSIONS.items()}
    wanted = {pair for pair in pairs.all_pairs(dimensions) if features.allowed(dict(pair))}
    assert wanted == set().union(*map(pairs.pairs_of, ROWS.values())) & wanted
    assert all(map(features.allowed, ROWS.values()))


def test_the_page_is_of_these_features() -> None:
    page = ROOT / "docs" / "reference" / "features.md"
    assert matrix_page.features_of(page.read_text()) == features.those_beside_the_baselines(), "nox -s matrix"
