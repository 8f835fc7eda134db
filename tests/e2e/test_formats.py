"""Each format of quantised checkpoints on each kind of model: logprobs beside transformers', or refused at start.

`nox -s formats` runs all and writes docs/reference/formats.md from what they gave; CI runs a few.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import formats_page
from tests.support.engine_run import run_scenarios
from tests.support.environments import ROOT
from tests.support.formats import CASES, Workshop, refusal

RESULTS = os.environ.get("NPU_FORMATS_RESULTS")
"""A folder for what each case gave; cases that are there already are not run again."""
WHOLE = {"npu_ops::linear", "npu_ops::fused_experts"}
"""What layers run that are not quantised."""
BY_DAY = [("AWQ", "sliding window")]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        pytest.param(*case, id=" on ".join(case), marks=[] if case in BY_DAY else [pytest.mark.nightly])
        for case in CASES
    ],
)
def test_format(form: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    """As near to the exact weights in float32 as transformers is in the engine's dtype, by quantised kernels."""
    result = Path(RESULTS, re.sub(r"\W+", "-", f"{form} {kind}") + ".json") if RESULTS else None
    if result and result.exists():
        pytest.skip("there is a result")
    said = refusal(form, kind)
    layers: list[str] = []
    if said is None:
        [run] = run_scenarios(tmp_path, [workshop.scenario(form, kind)])
        assert run.platform == "npu"
        found = run.implementations("ParallelLinear") | run.implementations("RoutedExperts")
        layers = sorted({how.rpartition(", ")[0] for how in found} - WHOLE)
        assert {"experts" in how for how in layers} == ({True, False} if kind in ("experts", "Jamba") else {False}), (
            found
        )
        workshop.errors(form, kind, run.rounds[0]).assert_most_within(1.5)
    else:
        with pytest.raises(AssertionError, match=re.escape(said)):
            run_scenarios(tmp_path, [workshop.scenario(form, kind)])
    if result:
        result.parent.mkdir(parents=True, exist_ok=True)
        ran = {"form": form, "kind": kind, "refused": said, "layers": layers, "ran": formats_page.now()}
        result.write_text(json.dumps(ran))


def test_the_page_is_of_these_cases() -> None:
    page = ROOT / "docs" / "reference" / "formats.md"
    assert formats_page.cases_of(page.read_text()) == len(CASES), "nox -s formats"
