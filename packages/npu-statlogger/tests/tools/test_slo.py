"""Targets: exact from requests, bounded from distributions."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_statlogger.cli import main
from npu_statlogger.fold import Batch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.merge import merged
from npu_statlogger.tools.slo import Account

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[..., Path]


@pytest.fixture
def slo(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict]]:
    def run(path: Path, *options: str) -> tuple[int, dict]:
        code = main(["slo", str(path), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_with_a_line_for_each_request_the_answer_is_exact(
    tmp_path: Path, request_line: Callable, as_text: Callable, slo: Callable
) -> None:
    random = np.random.default_rng(3)
    values = [(t, p, e) for t, p, e in zip(*(random.lognormal(0, 0.5, 1000) for _ in range(3)), strict=True)]
    path = tmp_path / "requests.jsonl"
    path.write_text(
        as_text(
            request_line(arrival=1e9 + i, e2e=e, first_token_seconds=t, time_per_output_token_seconds=p)
            for i, (t, p, e) in enumerate(values)
        )
    )
    good = sum(t <= 2 and p <= 1.8 and e <= 3 for t, p, e in values)
    code, result = slo(path, "--ttft", "2s", "--tpot", "1800ms", "--e2e", "3", "--objective", "80%")
    assert result["basis"] == "requests"
    assert result["met"] == pytest.approx([good / 1000] * 2)
    assert result["budget_requests"] == pytest.approx(200)
    assert result["budget_spent"] == pytest.approx([(1000 - good) / 200] * 2)
    assert result["missed"]["ttft"] == sum(t > 2 for t, _, _ in values)
    assert result["holds"] == (good >= 800)
    assert code == (0 if good >= 800 else 3)
    assert set(result["burn_rates"]) == {"5 min"}


def test_distributions_give_bounds_that_hold_the_truth(write_run: Write, make_load: type, slo: Callable) -> None:
    kept: list[tuple[float, ...]] = []

    def keep(batch: Batch, line: int, engine: int) -> None:
        names = ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds")
        kept.extend(zip(*(batch.values[name] for name in names), strict=True))

    path = write_run(lines=20, engines=2, change=keep)
    _, result = slo(path, "--ttft", "130ms", "--tpot", "22ms", "--e2e", "700ms", "--objective", "50%")
    truth = sum(t <= 0.13 and p <= 0.022 and e <= 0.7 for t, p, e in kept) / len(kept)
    assert result["basis"] == "distributions"
    assert result["met"][0] <= truth <= result["met"][1]
    assert result["requests"] == 800
    assert result["seconds"] == 200
    _, alone = slo(path, "--ttft", "130ms")
    share = sum(t <= 0.13 for t, _, _ in kept) / len(kept)
    assert alone["met"][0] <= share <= alone["met"][1]
    assert alone["met"][1] - alone["met"][0] < 0.05


def test_a_first_token_that_came_late_in_an_earlier_line_is_missed(
    write_run: Write, tmp_path: Path, slo: Callable
) -> None:
    def apart(batch: Batch, line: int, engine: int) -> None:
        if line % 3:
            batch.values["time_to_first_token_seconds"] = []
        if line % 3 < 2:
            batch.counters = type(batch.counters)({"scheduler_steps": 1})

    path = write_run(lines=60, slow=50, change=apart)
    code, result = slo(path, "--ttft", "500ms")
    assert (code, result["basis"]) == (3, "distributions")
    assert result["missed"]["ttft"] == 400
    assert result["met"] == [0, 0]
    assert result["burn_rates"]["5 min"] == pytest.approx([100, 100], rel=0.15)  # some finish within that began before
    merged = tmp_path / "merged.jsonl"
    assert main(["merge", str(path), "-o", str(merged), "--every", "1h"]) == 0
    assert slo(merged, "--ttft", "500ms")[1] | {"burn_rates": {}} == result | {"burn_rates": {}}


requests = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.booleans(), st.sampled_from(["stop", "error"])),
    min_size=1, max_size=40,
)  # fmt: skip


@given(requests, st.sampled_from([1, 2, 3, 9]))
def test_whenever_requests_begin_and_end_the_bounds_hold_the_truth_and_merging_changes_none(
    requests: list[tuple[int, int, bool, bool, str]], every: int
) -> None:
    batches, targets = defaultdict[int, Batch](Batch), {"ttft": 1.0, "e2e": 10.0}
    for begin, length, late, long, reason in requests:
        batches[begin].add("time_to_first_token_seconds", [2.0 if late else 0.5])
        batches[begin + length].add("e2e_request_latency_seconds", [20.0 if long else 5.0])
        batches[begin + length].count(f"request_success.{reason}", 1)
    lines = [Snapshot(10.0 * slot, 10.0 * slot + 10) for slot in range(17)]
    for slot, line in enumerate(lines):
        line.add(batches[slot])
    accounts = [Account(targets, 0.9) for _ in range(2)]
    for account, parts in zip(accounts, (lines, merged(lines, 10.0 * every)), strict=True):
        for part in parts:
            account.add_line(part)
    fine, coarse = (account.to_dict() for account in accounts)
    truth = sum(not (late or long or reason == "error") for _, _, late, long, reason in requests) / len(requests)
    assert fine["met"][0] - 1e-9 <= truth <= fine["met"][1] + 1e-9
    assert coarse["met"] == pytest.approx(fine["met"])
    assert coarse["missed"] == pytest.approx(fine["missed"])


def test_a_sample_of_the_requests_is_not_taken_for_all(
    write_run: Write, request_line: Callable, as_text: Callable, slo: Callable
) -> None:
    def late(batch: Batch, line: int, engine: int) -> None:
        batch.values["time_to_first_token_seconds"][:2] = [5.0, 5.0]

    path = write_run(lines=10, change=late)
    with path.open("a") as file:
        file.write(as_text(request_line(weight=50.0) for _ in range(4)))
    code, result = slo(path, "--ttft", "2s", "--objective", "95%")
    assert (code, result["basis"]) == (3, "distributions")
    assert result["met"] == pytest.approx([0.9, 0.9])
    with path.open("a") as file:
        file.write(as_text(request_line() for _ in range(190)))
    assert slo(path, "--ttft", "2s")[1]["basis"] == "requests"


def test_refused_and_failed_requests_have_missed(write_run: Write, slo: Callable) -> None:
    def refuse(batch: Batch, line: int, engine: int) -> None:
        batch.counters["admission_rejections.max_num_queued_reqs"] = 5
        batch.counters["request_success.error"] = 1

    _, result = slo(write_run(lines=10, requests=14, change=refuse), "--ttft", "1h")
    assert result["requests"] == 10 * (14 + 1 + 5)
    assert result["met"] == pytest.approx([0.7, 0.7])
    assert result["missed"] == {"ttft": 0, "failed or refused": 60}


def test_a_burn_rate_is_of_the_last_minutes(write_run: Write, slo: Callable) -> None:
    def late(batch: Batch, line: int, engine: int) -> None:
        if line >= 90:
            batch.values["time_to_first_token_seconds"] = [10.0] * 20

    _, result = slo(write_run(lines=120, change=late), "--ttft", "5s", "--objective", "0.9")
    assert result["met"] == pytest.approx([0.75, 0.75])
    assert result["burn_rates"]["5 min"] == pytest.approx([10, 10], rel=0.05)


def test_an_objective_that_cannot_be_told_is_not_shown_to_hold(
    write_run: Write, slo: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run()
    _, result = slo(path, "--ttft", "130ms", "--e2e", "700ms")
    between = sum(result["met"]) / 2
    options = ("--ttft", "130ms", "--e2e", "700ms", "--objective", str(between))
    code, result = slo(path, *options)
    assert (code, result["holds"]) == (3, None)
    assert main(["slo", str(path), *options]) == 3
    assert "cannot be told from distributions alone" in capsys.readouterr().out


def test_slo_needs_a_target_and_a_request(write_run: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slo", str(write_run())]) == 2
    assert "needs a target" in capsys.readouterr().err

    def nothing(batch: Batch, line: int, engine: int) -> None:
        batch.counters = type(batch.counters)({"scheduler_steps": 1})

    assert main(["slo", str(write_run(change=nothing)), "--ttft", "1s"]) == 2
    assert "no finished request" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--ttft", "-1s"], ["--ttft", "1y"], ["--ttft", "1", "--objective", "100%"]])
def test_a_wrong_option_says_what_is_right(
    options: list[str], write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["slo", str(write_run()), *options])
    assert "write one such as" in capsys.readouterr().err or options == ["--ttft", "-1s"]
