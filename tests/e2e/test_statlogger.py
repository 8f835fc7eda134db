"""npu-statlogger in a real server: its figures are those of vLLM's own /metrics and of the clients, merged or not."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from npu_platform.demo import MODEL
from npu_statlogger.lines import RequestLine, StepLine
from npu_statlogger.metrics import Kind, labelled, metrics
from npu_statlogger.reading import read_lines
from npu_statlogger.recorder import FOLD_SECONDS
from npu_statlogger.sketch import RELATIVE_ERROR
from npu_statlogger.snapshot import Snapshot
from tests.support.adapters import adapter
from tests.support.server import serve_demo, until
from tests.support.transformers_reference import load as load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_platform.demo.server import Server
    from npu_statlogger.lines import Line
    from npu_statlogger.sketch import Sketch

INTERVAL = 0.5
LEVELS = (1, 16, 64)
"""Numbers of clients at a time."""

DEPRECATED = {
    f"kv_offload_{name}.{way}_{back}"
    for name in ("total_bytes", "total_time", "size")
    for way, back in (("CPU_to", "GPU"), ("GPU_to", "CPU"))
}
"""Names of before, which vLLM exports beside today's."""

EACH = 2
"""Requests of a client."""

EXACT = {
    "e2e_request_latency_seconds": "e2e_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_inference_time_seconds": "inference_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "generation_tokens",
    "request_cached_tokens": "cached_tokens",
}
"""Distribution -> key of a request's line, whose values are exact."""


class Run:
    """What clients counted, what vLLM's metrics said, and what our file holds, of one server."""

    def __init__(self, server: Server, path: Path, levels: tuple[int, ...] = LEVELS) -> None:
        self.usage = asyncio.run(load(server, levels))
        self.requests = sum(EACH * clients for clients in levels)
        assert until(lambda: finished(path) == self.requests), f"{finished(path)} of {self.requests} are in the file"
        time.sleep(2 * INTERVAL + FOLD_SECONDS)  # what comes behind the last token
        self.metrics = scrape(server)
        self.lines: list[Line] = [line for line in read_lines(path) if not isinstance(line, Exception)]
        self.whole = merged(self.lines)


def merged(lines: list[Line]) -> Snapshot:
    whole = Snapshot()
    for line in lines:
        if isinstance(line, Snapshot):
            whole.merge(line)
    return whole


def finished(path: Path) -> int:
    return (
        merged([line for line in read_lines(path) if not isinstance(line, Exception)])
        .distributions["e2e_request_latency_seconds"]
        .count
    )


async def load(server: Server, levels: tuple[int, ...] = LEVELS) -> Counter[str]:
    """Let growing numbers of clients ask, half of them with a prefix in common, and return the usage that they got."""
    usage = Counter[str]()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        for turn in range(EACH):
            prompt = "The capital of Norway is Oslo. " * (8 * (number % 2)) + f"{number} plus {turn} is"
            body = {
                "model": server.name,
                "prompt": prompt,
                # So long that the engine has all the requests that it takes, however fast it is.
                "max_tokens": 48 + number % 5,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = (await http.post(f"{server.url}/v1/completions", json=body)).raise_for_status().json()
            usage.update({key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")})

    async with httpx.AsyncClient(trust_env=False, timeout=300, limits=httpx.Limits(max_connections=300)) as http:
        for clients in levels:
            await asyncio.gather(*(client(http, number) for number in range(clients)))
    return usage


def scrape(server: Server) -> dict[str, dict[tuple[str, str], float]]:
    """Return the samples of vLLM's metrics: name without "vllm:" -> (engine, value of the further label) -> value."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found: defaultdict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            further = {
                key: value for key, value in sample.labels.items() if key not in ("engine", "model_name", "le", "pid")
            }
            key = (sample.labels.get("engine", ""), next(iter(further.values()), ""))
            if len(further) <= 1 and "le" not in sample.labels:
                values = found[sample.name.removeprefix("vllm:")]
                values[key] = values.get(key, 0) + sample.value
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("statlogger")
    with serve_demo(folder, "--kv-cache-metrics", "--kv-cache-metrics-sample", "1", **environ(folder)) as server:
        yield Run(server, folder / "stats.jsonl")


def environ(folder: Path, **more: str) -> dict[str, str]:
    settings = {"PATH": str(folder / "stats.jsonl"), "INTERVAL": str(INTERVAL), "REQUESTS": "1", "STEPS": "1"} | more
    return {f"NPU_STATLOGGER_{name}": value for name, value in settings.items()}


def figures(whole: Snapshot, kind: Kind, name: str) -> dict[str, Any]:
    """Return a figure of ours by its label."""
    sections = {Kind.COUNTER: whole.counters, Kind.DISTRIBUTION: whole.distributions}
    return {
        found.partition(".")[2]: value for found, value in sections[kind].items() if found.partition(".")[0] == name
    }


def check_counters(run: Run) -> list[str]:
    """Compare every counter that both have and return their names."""
    compared = []
    for metric in metrics():
        theirs = run.metrics.get(f"{metric.name}_total", {}) if metric.kind is Kind.COUNTER and not metric.own else {}
        if not theirs:
            continue
        by_label = Counter[str]()
        for (_, label), value in theirs.items():
            by_label[label] += int(value)
        ours = figures(run.whole, metric.kind, metric.name)
        assert {label: ours.get(label, 0) for label in by_label} == dict(by_label), metric.name
        assert set(ours) <= set(by_label), metric.name
        compared.append(metric.name)
    return compared


def check_distributions(run: Run) -> list[str]:
    """Compare count and sum of every distribution that both have and return their names."""
    compared = []
    for metric in metrics():
        counts = (
            run.metrics.get(f"{metric.name}_count", {}) if metric.kind is Kind.DISTRIBUTION and not metric.own else {}
        )
        if not counts:
            continue
        sketch: Sketch = run.whole.distributions[metric.name]
        assert sketch.count == sum(counts.values()), metric.name
        total = sum(run.metrics[f"{metric.name}_sum"].values())
        # Of each value 1e-9 is kept.
        assert sketch.total == pytest.approx(total, rel=1e-9, abs=1e-9 * sketch.count), metric.name
        compared.append(metric.name)
    return compared


def test_counters_are_those_of_vllm_s_metrics_and_of_the_clients(run: Run) -> None:
    compared = check_counters(run)
    assert {"prompt_tokens", "prompt_tokens_by_source", "generation_tokens", "request_success", "prefix_cache_hits",
            "prompt_tokens_cached", "prompt_tokens_cached_by_source", "num_preemptions", "mm_cache_queries"} <= set(compared)  # fmt: skip
    assert run.whole.counters["prompt_tokens"] == run.usage["prompt_tokens"]
    assert run.whole.counters["generation_tokens"] == run.usage["completion_tokens"]
    assert run.whole.counters["request_success.length"] == run.requests
    assert run.whole.counters["prefix_cache_hits"] > 0
    assert not {"records_dropped", "records_failed", "values_not_finite"} & set(run.whole.counters)


def test_distributions_have_the_counts_and_sums_of_vllm_s_histograms(run: Run) -> None:
    compared = check_distributions(run)
    timed = {metric.name for metric in metrics() if metric.kind is Kind.DISTRIBUTION and not metric.own}
    assert timed - set(compared) <= {metric.name for metric in metrics() if metric.needs}


def test_gauges_are_the_last_that_vllm_set(run: Run) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert run.whole.gauge(name) == {engine: value for (engine, _), value in run.metrics[name].items()}
    for reason in ("capacity", "deferred"):
        name = labelled("num_requests_waiting_by_reason", reason)
        assert run.whole.gauge(name)["0"] == run.metrics["num_requests_waiting_by_reason"]["0", reason]


def test_every_request_has_a_line_and_percentiles_are_within_the_error_of_the_exact_ones(run: Run) -> None:
    check_requests(run)


def check_requests(run: Run) -> None:
    """Compare the lines of all requests with the clients' counts, and percentiles with those of the lines."""
    requests = [line for line in run.lines if isinstance(line, RequestLine)]
    assert len(requests) == len({line.request_id for line in requests}) == run.requests
    assert sum(line.prompt_tokens for line in requests) == run.usage["prompt_tokens"]
    assert sum(line.generation_tokens for line in requests) == run.usage["completion_tokens"]
    for name, key in EXACT.items():
        values = sorted(getattr(line, key) for line in requests)
        for q in (0.5, 0.9, 0.99, 0.999):
            exact = values[max(1, math.ceil(q * len(values))) - 1]
            ours = run.whole.distributions[name].quantile(q)
            assert abs(ours - exact) <= RELATIVE_ERROR * abs(exact) * (1 + 1e-9) + 1e-6, (name, q)


@pytest.mark.nightly
def test_with_256_clients(tmp_path: Path) -> None:
    with serve_demo(tmp_path, **environ(tmp_path)) as server:
        run = Run(server, tmp_path / "stats.jsonl", (1, 16, 256))
        assert run.whole.counters["generation_tokens"] == run.usage["completion_tokens"]
        assert {"generation_tokens", "prefix_cache_hits"} <= set(check_counters(run))
        assert "inter_token_latency_seconds" in check_distributions(run)
        check_requests(run)


def test_every_step_has_a_line_and_they_add_up(run: Run) -> None:
    steps = [line for line in run.lines if isinstance(line, StepLine)]
    assert len(steps) == run.whole.counters["scheduler_steps"]
    assert sum(step.generation_tokens for step in steps) == run.usage["completion_tokens"]
    assert sum(step.prompt_tokens + step.cached_tokens for step in steps) == run.usage["prompt_tokens"]
    assert sum(step.finished for step in steps) == run.requests
    assert max(step.running for step in steps) == 8


@pytest.mark.nightly
def test_prometheus_beside_vllm_s_own_metrics(tmp_path: Path) -> None:
    settings = {"PROMETHEUS": "vllm", "SQLITE": str(tmp_path / "stats.db")}
    with serve_demo(tmp_path, **environ(tmp_path, **settings)) as server:
        run = Run(server, tmp_path / "stats.jsonl")
        ours = {key[0]: value for key, value in run.metrics["npu_statlogger_generation_tokens_total"].items()}
        assert until(
            lambda: scrape(server)["npu_statlogger_generation_tokens_total"] == run.metrics["generation_tokens_total"]
        )
        assert ours["0"] <= run.usage["completion_tokens"]


OFFLOADING = {
    "kv_connector": "NPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(
            ("--speculative-config", json.dumps(SPECULATION), "--enable-mfu-metrics"),
            {"spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos", "estimated_flops_per_gpu"},
            id="speculation",
        ),
        pytest.param(
            ("--kv-transfer-config", json.dumps(OFFLOADING)),
            {"external_prefix_cache_queries", "prompt_tokens_cached_by_source"},
            id="offloading",
        ),
    ],
)
def test_what_further_settings_make_vllm_export_is_the_same_here(
    tmp_path: Path, arguments: tuple[str, ...], names: set[str]
) -> None:
    with serve_demo(tmp_path, *arguments, **environ(tmp_path)) as server:
        run = Run(server, tmp_path / "stats.jsonl")
        assert names <= set(check_counters(run))
        assert "time_to_first_token_seconds" in check_distributions(run)
        check_connector(run)


@pytest.mark.nightly
def test_evictions_and_graphs(tmp_path: Path) -> None:
    few = (
        "--kv-cache-metrics",
        "--kv-cache-metrics-sample",
        "1",
        "--max-model-len",
        "256",
        "--num-gpu-blocks-override",
        "48",
        "--cudagraph-metrics",
    )
    with serve_demo(tmp_path, *few, **environ(tmp_path)) as server:
        run = Run(server, tmp_path / "stats.jsonl")
    check_counters(run)
    assert {"kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"} <= set(check_distributions(run))
    assert run.whole.distributions["kv_block_lifetime_seconds"].count > 0
    # vLLM logs these and does not export them: they must add up.
    graphs = {
        name: figures(run.whole, Kind.COUNTER, f"cudagraph_{name}")
        for name in ("steps", "unpadded_tokens", "padded_tokens", "paddings")
    }
    assert "FULL" in graphs["steps"]
    assert sum(graphs["steps"].values()) <= run.whole.counters["scheduler_steps"]
    for mode, padded in graphs["padded_tokens"].items():
        assert padded == graphs["unpadded_tokens"][mode] + graphs["paddings"].get(mode, 0)


@pytest.mark.nightly
def test_requests_of_adapters(tmp_path: Path) -> None:
    adapter(tmp_path / "one", load_model(MODEL), ["q_proj", "down_proj"], 8, 0)
    options = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"one={tmp_path / 'one'}")
    with serve_demo(tmp_path, *options, **environ(tmp_path)) as server:
        body = {"model": "one", "prompt": "Oslo", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(4) as clients:
            answers = [
                clients.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False)
                for _ in range(4)
            ]
            theirs = until(lambda: "one" in str(scrape_labels(server, "lora_requests_info", "running_lora_adapters")))
            assert theirs
            for answer in answers:
                assert answer.result().status_code == 200
        assert until(lambda: finished(tmp_path / "stats.jsonl") == 4)
    lines = [line for line in read_lines(tmp_path / "stats.jsonl") if isinstance(line, Snapshot)]
    running = [
        line.gauges[engine][name][1]
        for line in lines
        for engine in line.gauges
        for name in line.gauges[engine]
        if name == "lora_requests_running.one"
    ]
    assert max(running) == 4


def scrape_labels(server: Server, name: str, label: str) -> set[str]:
    """Return the values of a label of one of vLLM's metrics."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    families = [family for family in text_string_to_metric_families(text) if family.name == f"vllm:{name}"]
    return {sample.labels.get(label, "") for family in families for sample in family.samples}


def check_connector(run: Run) -> None:
    """Compare what a connector measured: counters and totals, counts of distributions."""
    theirs = {name: values for name, values in run.metrics.items() if name.startswith("kv_offload_")}
    for name, values in theirs.items():
        for (_, label), value in values.items():
            plain = labelled(name.removesuffix("_total").removesuffix("_count"), *filter(None, [label]))
            if name.endswith("_total") and plain not in DEPRECATED:
                assert run.whole.total(plain) == pytest.approx(value, rel=1e-6, abs=1e-9), name
            elif name.endswith("_count") and plain not in DEPRECATED:
                assert run.whole.distributions[plain].count == value, name


@pytest.mark.nightly
def test_two_engines_behind_two_api_servers_merge_into_the_whole(tmp_path: Path) -> None:
    several = ("--data-parallel-size", "2", "--api-server-count", "2")
    with serve_demo(tmp_path, *several, NPU_SIMULATOR_DEVICES="2", **environ(tmp_path)) as server:
        run = Run(server, tmp_path / "stats.jsonl")
        assert len(run.whole.processes) == 2
        assert run.whole.engines == {0, 1}
        assert run.whole.counters["prompt_tokens"] == run.usage["prompt_tokens"]
        assert run.whole.counters["generation_tokens"] == run.usage["completion_tokens"]
        assert run.whole.counters["request_success.length"] == run.requests
        assert "generation_tokens" in check_counters(run)
        assert "time_to_first_token_seconds" in check_distributions(run)
        check_requests(run)


@pytest.mark.nightly
def test_a_server_that_is_killed_leaves_whole_lines_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    totals = []
    for _ in range(2):
        with serve_demo(tmp_path, **environ(tmp_path)) as server:
            asyncio.run(load(server))
            assert until(lambda: finished(path) == len(totals) * 162 + 162)
            for process in merged(list(lines_of(path))).processes - {
                name for total in totals for name in total.processes
            }:
                os.kill(int(process.rpartition(":")[2]), signal.SIGKILL)
        totals.append(merged(list(lines_of(path))))
    assert all(not isinstance(line, Exception) for line in read_lines(path))
    assert totals[1].counters["request_success.length"] == 2 * totals[0].counters["request_success.length"]


def lines_of(path: Path) -> Iterator[Line]:
    return (line for line in read_lines(path) if not isinstance(line, Exception))
