"""Results of `vllm bench serve`; tests/e2e reads one that vLLM itself wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from npu_statlogger.cli import main
from npu_statlogger.errors import InputError
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools.bench import read_requests, read_snapshots
from npu_statlogger.tools.source import Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write(tmp_path: Path, bench_result: Callable) -> Callable[..., Path]:
    def write(*results: dict) -> Path:
        path = tmp_path / "result.json"
        path.write_text("\n".join(map(json.dumps, results or (bench_result(),))))
        return path

    return write


def whole(path: Path) -> Snapshot:
    merged = Snapshot()
    for snapshot in read_snapshots(path):
        merged.merge(snapshot)
    return merged


def test_a_detailed_result_gives_each_requests_times(write: Callable, bench_result: Callable) -> None:
    path, result = write(), bench_result()
    merged = whole(path)
    assert merged.counters["request_success.completed"] == 40
    assert merged.counters["request_success.error"] == 1
    assert merged.counters["generation_tokens"] == result["total_output_tokens"]
    assert merged.counters["prompt_tokens"] == result["total_input_tokens"]
    assert merged.distributions["time_to_first_token_seconds"].count == 40
    assert merged.distributions["inter_token_latency_seconds"].count == 40 * 9
    assert merged.distributions["e2e_request_latency_seconds"].maximum == max(result["latencies"])
    assert merged.end - merged.start == pytest.approx(result["duration"], abs=1.0)
    assert len(list(read_snapshots(path))) > 5


def test_requests_of_a_detailed_result(write: Callable) -> None:
    requests = list(read_requests(write()))
    assert len(requests) == 41
    assert {request.reason for request in requests} == {"completed", "error"}
    assert requests[0].tpot == pytest.approx(0.02)


def test_without_details_counters_and_whole_times_are_there(write: Callable, bench_result: Callable) -> None:
    brief = {key: value for key, value in bench_result().items() if key not in {"ttfts", "itls", "start_times"}}
    path = write(brief)
    (snapshot,) = read_snapshots(path)
    assert snapshot.counters["request_success.completed"] == 40
    assert snapshot.distributions["e2e_request_latency_seconds"].count == 40
    with pytest.raises(InputError, match="--save-detailed"):
        list(read_requests(path))


def test_appended_results_are_all_read(write: Callable, bench_result: Callable) -> None:
    assert whole(write(bench_result(), bench_result())).counters["request_success.completed"] == 80


def test_a_client_is_not_added_to_its_server(
    write: Callable, write_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(write_run()), str(write())]) == 2
    assert "has counted the same requests" in capsys.readouterr().err


def test_runs_of_a_client_are_compared(write: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    path = write()
    assert main(["diff", str(path), str(path)]) == 0
    assert "+0.0 %" in capsys.readouterr().out
    assert main(["diff", str(path), str(path), "--json"]) == 0
    assert min(json.loads(capsys.readouterr().out)["blocks"]) >= 8


def test_a_damaged_result_is_named(write: Callable, bench_result: Callable, tmp_path: Path) -> None:
    path = write()
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError, match=f"cannot read {path} as a result"):
        list(Reading([path]))
    with pytest.raises(InputError, match="a field is missing or wrong"):
        list(Reading([write({key: value for key, value in bench_result().items() if key != "date"})]))
