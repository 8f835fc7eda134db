"""Each kind of model says the same on several devices, in every layout, as on one; or is refused at start.

`nox -s layouts` runs all and writes docs/reference/layouts.md from what they gave. Day and night run a sample, in which
every two choices of ranks, of who starts them, of the kind of the model, the runner, the graphs and the scheduling meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import launched_run, layout_sample, layouts_page, models, pairs
from tests.support.environments import ROOT
from tests.support.layouts import CASES, LAYOUTS, Workshop, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = os.environ.get("NPU_LAYOUTS_RESULTS")
"""A folder for what each case gave; cases that are there already are not run again."""
SAMPLE = {layout_sample.name_of(row): row for row in layout_sample.rows()}
BY_DAY = 20  # of the sample: more than nine of ten pairs, and each kind of model twice; the rest meet in the other rows
ROWS = [pytest.param(name, marks=[] if i < BY_DAY else pytest.mark.nightly) for i, name in enumerate(SAMPLE)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("workshop"))
    yield made
    made.close()


@contextlib.contextmanager
def skipped_where_it_cannot_start() -> Iterator[None]:
    """Skip where Ray is not there, or this user cannot make a second host."""
    try:
        yield
    except (ImportError, PermissionError) as error:
        pytest.skip(str(error))


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "kind"), [pytest.param(*case, id=", ".join(case)) for case in CASES])
def test_layout(layout: str, kind: str, workshop: Workshop, tmp_path: Path) -> None:
    result = Path(RESULTS, re.sub(r"\W+", "-", f"{layout} {kind}") + ".json") if RESULTS else None
    if result and result.exists():
        pytest.skip("there is a result")
    said = refusal(layout, kind)
    with skipped_where_it_cannot_start():
        if said is None:
            assert workshop.on_several(LAYOUTS[layout], kind, tmp_path) == workshop.on_one_device(LAYOUTS[layout], kind)
        else:
            with pytest.raises(AssertionError, match=re.escape(said)):
                workshop.on_several(LAYOUTS[layout], kind, tmp_path)
    if result:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps({"layout": layout, "kind": kind, "refused": said}))


@pytest.mark.parametrize("name", ROWS)
def test_sample(name: str, workshop: Workshop, tmp_path: Path) -> None:
    row = SAMPLE[name]
    layout, how = layout_sample.layout_of(row), layout_sample.how_of(row)
    with skipped_where_it_cannot_start():
        assert workshop.on_several(layout, row["model"], tmp_path, how) == workshop.on_one_device(layout, row["model"])


def test_every_two_choices_that_go_together_meet_in_the_sample() -> None:
    wanted = {pair for pair in pairs.all_pairs(layout_sample.DIMENSIONS) if layout_sample.allowed(dict(pair))}
    assert wanted <= set().union(*map(pairs.pairs_of, SAMPLE.values()))
    assert all(map(layout_sample.allowed, SAMPLE.values()))


def test_nearly_all_pairs_meet_by_day() -> None:
    pairs_of_rows = [pairs.pairs_of(row) for row in SAMPLE.values()]
    by_day = set[pairs.Pair]().union(*pairs_of_rows[:BY_DAY])
    assert len(by_day) > 0.9 * len(set().union(*pairs_of_rows))
    kinds = [row["model"] for row in list(SAMPLE.values())[:BY_DAY]]
    assert all(kinds.count(kind) >= 2 for kind in layout_sample.DIMENSIONS["model"])


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
