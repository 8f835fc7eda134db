"""npu-stat on what a real server wrote: under `vllm bench serve`, beside its result, and replayed to the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import promql_parser
import pytest
import yaml

from npu_platform.demo import MODEL
from npu_statlogger.tools.dashboard import text_of
from tests.support.server import serve_demo, until
from tests.support.vllm_process import run_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_platform.demo.server import Server

REQUESTS, PROMPT, ANSWER = 40, 24, 12
INTERVAL = 0.5
ON_DEMAND = ("vllm:spec_decode_", "vllm:corrupted_requests")
"""Metrics that vLLM exports with --speculative-config or VLLM_COMPUTE_NANS_IN_LOGITS alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("statistics")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    environ = {
        "NPU_STATLOGGER_PATH": str(folder / "stats.jsonl"),
        "NPU_STATLOGGER_INTERVAL": str(INTERVAL),
        "NPU_STATLOGGER_REQUESTS": "1",
    }
    with serve_demo(folder, **environ) as server:
        yield server


@pytest.fixture(scope="module")
def result(server: Server, folder: Path) -> Path:
    """Let vLLM's own benchmark load the server, and return what it saved."""
    lengths = {"--random-input-len": PROMPT, "--random-output-len": ANSWER, "--num-prompts": REQUESTS}
    options = [str(part) for pair in lengths.items() for part in pair]
    command = ["bench", "serve", "--base-url", server.url]
    command += ["--model", server.name, "--tokenizer", str(MODEL), "--dataset-name", "random", *options, "--ignore-eos"]
    command += ["--request-rate", "20", "--num-warmups", "0", "--ready-check-timeout-sec", "0"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json"]
    done = run_module("vllm.entrypoints.cli.main", *command)
    assert done.returncode == 0, done.stderr[-4000:]
    stats = folder / "stats.jsonl"
    assert until(lambda: npu_stat("summary", stats)["counters"].get("request_success.length", 0) >= REQUESTS)
    time.sleep(2 * INTERVAL)
    return folder / "result.json"


def npu_stat(*arguments: object, code: int = 0) -> Any:
    command = [str(Path(sys.prefix) / "bin" / "npu-stat"), *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_the_server_counts_what_the_client_does(result: Path, folder: Path) -> None:
    ours, theirs = npu_stat("summary", folder / "stats.jsonl"), npu_stat("summary", result)
    saved = json.loads(result.read_text())
    assert ours["counters"]["request_success.length"] == REQUESTS == saved["completed"]
    assert ours["counters"]["generation_tokens"] == REQUESTS * ANSWER == saved["total_output_tokens"]
    assert theirs["counters"]["generation_tokens"] == REQUESTS * ANSWER
    assert theirs["counters"]["request_success.completed"] == REQUESTS
    assert ours["counters"]["prompt_tokens"] == saved["total_input_tokens"] == theirs["counters"]["prompt_tokens"]
    # The client's figures are vLLM's interpolated ones, ours are at the nearest rank and within 1 %.
    client = theirs["distributions"]["time_to_first_token_seconds"]
    assert client["mean"] == pytest.approx(saved["mean_ttft_ms"] / 1000, rel=1e-6)
    assert client["count"] == REQUESTS
    server = ours["distributions"]["e2e_request_latency_seconds"]
    assert server["max"] <= theirs["distributions"]["e2e_request_latency_seconds"]["max"]


def test_the_report_sets_them_beside_each_other(result: Path, folder: Path) -> None:
    page = folder / "report.html"
    command = [str(Path(sys.prefix) / "bin" / "npu-stat"), "report", str(folder / "stats.jsonl"), str(result)]
    subprocess.run([*command, "--html", str(page)], check=True, timeout=500)
    text = page.read_text()
    assert "vllm bench serve beside the server" in text
    assert text.count("<svg") >= 6


def test_goodput_is_that_of_the_requests_lines(result: Path, folder: Path) -> None:
    answer = npu_stat("slo", folder / "stats.jsonl", "--ttft", "1h", "--e2e", "1h")
    assert answer["basis"] == "requests"
    assert (answer["requests"], answer["met"]) == (REQUESTS, [1.0, 1.0])
    assert npu_stat("slo", folder / "stats.jsonl", "--e2e", "1us", code=3)["met"] == [0.0, 0.0]


def test_the_load_is_replayed_to_the_server(result: Path, server: Server, folder: Path) -> None:
    recorded = folder / "recorded.jsonl"
    recorded.write_text((folder / "stats.jsonl").read_text())
    answer = npu_stat("replay", recorded, "--url", server.url, "-o", folder / "replayed.jsonl")
    assert (answer["sent"], answer["failed"], answer["first_error"]) == (REQUESTS, 0, "")
    counters = answer["replayed"]["counters"]
    assert counters["generation_tokens"] == REQUESTS * ANSWER
    assert counters["prompt_tokens"] == answer["recorded"]["counters"]["prompt_tokens"]
    assert answer["late_seconds"]["p50"] < 0.1
    rows = npu_stat("diff", result, folder / "replayed.jsonl")["changes"]
    assert {"time_to_first_token_seconds", "inter_token_latency_seconds"} <= {row["name"] for row in rows}


def test_the_doctor_sees_that_it_writes(result: Path, folder: Path) -> None:
    findings = npu_stat("doctor", folder / "stats.jsonl")["findings"]
    assert any("which runs" in finding["detail"] for finding in findings)


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_the_server_has(result: Path, server: Server) -> None:
    labels: dict[str, set[str]] = {}
    for name, found in re.findall(r"^(vllm:\w+)\{(.*)\} \S+$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', found))
    targets = [
        target["expr"] for panel in json.loads(text_of("grafana"))["panels"] for target in panel.get("targets", ())
    ]
    rules = [rule["expr"] for rule in yaml.safe_load(text_of("alerts"))["groups"][0]["rules"]]
    for expression in [*targets, *rules]:
        text = expression.replace("$__rate_interval", "5m")
        promql_parser.parse(text)
        for name, matchers in re.findall(r"(vllm:\w+)(?:\{(.*?)\})?", text):
            if not name.startswith(ON_DEMAND):
                assert set(re.findall(r"(\w+)=", matchers)) <= labels[name], name
