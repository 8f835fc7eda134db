"""Each kind of model says the same on several devices, in every layout, as on one; or is refused at start.

`nox -s layouts` runs all and writes docs/reference/layouts.md from what they gave; CI runs one of each new kind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import launched_run, layouts_page, models
from tests.support.environments import ROOT
from tests.support.layouts import CASES, Workshop, refusal

RESULTS = os.environ.get("NPU_LAYOUTS_RESULTS")
"""A folder for what each case gave; cases that are there already are not run again."""
BY_DAY = [("EP over DP 2", "experts"), ("TP 2, DCP 2", "dense")]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [pytest.param(*case, id=", ".join(case), marks=[] if case in BY_DAY else [pytest.mark.nightly]) for case in CASES],
)
def test_layout(layout: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    result = Path(RESULTS, re.sub(r"\W+", "-", f"{layout} {kind}") + ".json") if RESULTS else None
    if result and result.exists():
        pytest.skip("there is a result")
    said = refusal(layout, kind)
    if said is None:
        assert workshop.on_several(layout, kind, tmp_path) == workshop.on_one_device(layout, kind)
    else:
        with pytest.raises(AssertionError, match=re.escape(said)):
            workshop.on_several(layout, kind, tmp_path)
    if result:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps({"layout": layout, "kind": kind, "refused": said}))


@pytest.mark.nightly
def test_torchrun(tmp_path: Path) -> None:
    """`torchrun` itself starts the ranks of an engine, which all answer."""
    model, prompts = models.tiny_llama(tmp_path / "model"), models.prompt_token_ids([5, 40])
    rounds = [{"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": 4}}]
    engine = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 24, "tensor_parallel_size": 2}
    scenario = launched_run.write_scenario(tmp_path / "ranks", model, rounds, ranks=2, **engine)
    environ = {"NPU_SIMULATOR_DEVICES": "2", "NPU_SIMULATOR_MEMORY": "1GiB", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--module")
    command = [sys.executable, *launcher, "tests.support.launched_run", str(scenario)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert [len(tokens) for tokens in launched_run.said_by(2, scenario)] == [4, 4]


def test_the_page_is_of_these_cases() -> None:
    page = ROOT / "docs" / "reference" / "layouts.md"
    assert layouts_page.cases_of(page.read_text()) == len(CASES), "nox -s layouts"
