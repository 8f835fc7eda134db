"""Two runs: what changed is found, what did not is not, and intervals hold what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from npu_statlogger.cli import main
from npu_statlogger.fold import Batch
from npu_statlogger.tools import names
from npu_statlogger.tools.diff import FEWEST_BLOCKS, Change, Run, compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., Path]


def changes(a: object, b: object) -> dict[tuple[str, str], Change]:
    return {(each.name, each.statistic): each for each in compare(Run(a.snapshots(), 0), Run(b.snapshots(), 1))}


def test_a_slower_run_is_worse_and_its_rates_are_the_same(make_load: type) -> None:
    found = changes(make_load(seed=1), make_load(seed=2, slow=1.2))
    for statistic in ("mean", "p50", "p90"):
        change = found[names.TTFT, statistic]
        assert change.verdict == "worse"
        assert change.low < 1.2 < change.high
        assert change.worse_than(0.05)
        assert not change.worse_than(0.3)
    assert found["generation_tokens_per_second", "rate"].verdict == "same"
    assert found["prefix_cache_hit_rate", "rate"].ratio == pytest.approx(1)


def test_a_faster_run_with_fewer_tokens_is_better_and_worse(make_load: type) -> None:
    found = changes(make_load(requests=20), make_load(requests=10, slow=0.5, seed=5))
    assert found[names.ITL, "p50"].verdict == "better"
    assert found["generation_tokens_per_second", "rate"].verdict == "worse"
    assert found["requests_per_second", "rate"].ratio == pytest.approx(0.5)


def test_intervals_hold_the_truth_about_as_often_as_they_say(make_load: type) -> None:
    """The load drifts, so that neighbours resemble one another, and both runs are truly the same."""
    random = np.random.default_rng(11)
    held = []
    for _ in range(40):
        drift = np.cumsum(random.normal(0, 0.02, (2, 64)), axis=1)

        def slower(batch: Batch, line: int, engine: int, run: int, drift: np.ndarray = drift) -> None:
            pull = 0.7 ** np.arange(line + 1)[::-1]  # back to the mean: else a run has none
            level = np.exp((np.diff(drift[run, : line + 1], prepend=0) * pull).sum())
            batch.values = {names.TTFT: (np.array(batch.values[names.TTFT]) * level).tolist()}  # type: ignore[assignment]

        sides = [
            make_load(
                lines=64, seed=int(random.integers(1 << 30)), change=lambda b, n, e, run=run: slower(b, n, e, run)
            )
            for run in range(2)
        ]
        change = changes(*sides)[names.TTFT, "mean"]
        held.append(change.low <= 1 <= change.high)
    assert sum(held) >= 33  # of 40: 38 are due, and fewer than 33 come once in some thousand runs


def test_too_few_blocks_have_no_interval(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run("a", lines=FEWEST_BLOCKS // 2), write_run("b", lines=FEWEST_BLOCKS // 2, seed=2)
    assert main(["diff", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "No intervals" in text
    assert "?" in text
    assert main(["diff", str(a), str(b), "--json", "--fail-over", "1%"]) == 0
    assert {change["verdict"] for change in json.loads(capsys.readouterr().out)["changes"]} == {"unknown"}


def test_a_script_learns_of_a_regression(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run("a", seed=1), write_run("b", seed=2, slow=1.3)
    assert main(["diff", str(a), str(b), "--fail-over", "10%"]) == 3
    assert main(["diff", str(a), str(b), "--fail-over", "50%"]) == 0
    assert main(["diff", str(b), str(a), "--fail-over", "10%"]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 0
    assert "+30" in capsys.readouterr().out.replace("+29", "+30").replace("+31", "+30")


def test_the_same_files_give_the_same_answer(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run("a", seed=1), write_run("b", seed=2)
    answers = []
    for _ in range(2):
        main(["diff", str(a), str(b), "--json"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    verdicts = [change["verdict"] for change in json.loads(answers[0])["changes"]]
    assert verdicts.count("same") >= 0.85 * len(verdicts)
