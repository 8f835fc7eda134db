"""Real servers take what is served and sent: Prometheus and its gateway, an OpenTelemetry collector, StatsD.

Where one is not installed and no package registry has it, its test is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.lines import Run
from npu_statlogger.sinks import open_sinks
from npu_statlogger.snapshot import Snapshot
from tests.support.stores import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("prometheus_client")
RUN = Run(
    time=1.0,
    process="host:1",
    model="m",
    versions={"vllm": "0.32.0", "npu-statlogger": "0.32.0"},
    engines=[0],
    settings={},
)
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def line() -> Snapshot:
    made = Snapshot(start=0, end=10, engines={0})
    made.counters.update({"generation_tokens": 42, "request_success.length": 3})
    made.gauges["0"]["kv_cache_usage_perc"] = (9.0, 0.25)
    made.distributions["time_to_first_token_seconds"].add([0.001 * number for number in range(1, 1001)])
    made.distributions["kv_cache_usage_perc"].add([0.25])
    return made


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def until(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first answer that is not empty."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = ask()
        except (urllib.error.URLError, OSError):
            found = None
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.fixture
def served() -> Iterator[int]:
    """The port at which figures are served."""
    (sink,) = open_sinks(StatLoggerConfig(prometheus=f"127.0.0.1:{free_port()}"), RUN)
    sink.write([line()])
    yield sink._server[0].server_port  # type: ignore[attr-defined]
    sink.close()


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_promtool_finds_nothing_to_mend(served: int) -> None:
    text = answer(f"http://127.0.0.1:{served}/metrics")
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], check=False, input=text, capture_output=True, text=True
    )
    # It would have names that end in units of its own choice, and no `_total` in a distribution's name.
    assert done.returncode in (0, 3), done.stderr
    assert "error while linting" not in done.stderr


def test_prometheus_scrapes_and_answers_queries(served: int, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(target=f"127.0.0.1:{served}"))
    port = free_port()
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    server = subprocess.Popen([program("prometheus"), *options], cwd=tmp_path, stderr=subprocess.DEVNULL)

    def value(query: str) -> float:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        (sample,) = until(lambda: json.loads(answer(url))["data"]["result"])
        return float(sample["value"][1])

    try:
        assert value('npu_statlogger_generation_tokens_total{engine="0", model_name="m"}') == 42
        assert value('npu_statlogger_request_success_total{finished_reason="length"}') == 3
        assert value("npu_statlogger_kv_cache_usage_perc") == 0.25
        assert value('npu_statlogger_time_to_first_token_seconds{quantile="0.99"}') == pytest.approx(0.99, rel=0.01)
        assert value("npu_statlogger_time_to_first_token_seconds_count") == 1000
    finally:
        server.terminate()
        server.wait(timeout=60)


def test_a_push_gateway_holds_the_figures_of_each_process(tmp_path: Path) -> None:
    port = free_port()
    gateway = subprocess.Popen(
        [program("prometheus-pushgateway"), f"--web.listen-address=127.0.0.1:{port}"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert until(lambda: answer(f"http://127.0.0.1:{port}/-/ready"))
        (sink,) = open_sinks(StatLoggerConfig(push=f"http://127.0.0.1:{port}"), RUN)
        sink.write([line()])
        sink.write([line()])
        sink.close()
        samples = answer(f"http://127.0.0.1:{port}/metrics").splitlines()
        (tokens,) = [sample for sample in samples if sample.startswith("npu_statlogger_generation_tokens_total{")]
        assert 'instance="host:1"' in tokens
        assert 'job="vllm"' in tokens
        assert tokens.endswith(" 84")
    finally:
        gateway.terminate()
        gateway.wait(timeout=60)


def test_an_opentelemetry_collector_takes_the_metrics_and_sends_them_on(server: Any, tmp_path: Path) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("no OpenTelemetry collector is installed (pip install rotel; Linux on x86-64 and aarch64)")
    port = free_port()
    options = {
        "otlp-http-endpoint": f"127.0.0.1:{port}",
        "otlp-grpc-endpoint": f"127.0.0.1:{free_port()}",
        "exporter": "otlp",
        "otlp-exporter-endpoint": f"http://127.0.0.1:{server.server_port}",
        "otlp-exporter-protocol": "http",
        "otlp-exporter-compression": "none",
        "batch-timeout": "100ms",
    }
    command = [str(Path(found.origin).with_name("rotel-agent")), "start", "--pid-file", str(tmp_path / "pid")]
    with (tmp_path / "log").open("wb") as log:
        collector = subprocess.Popen([*command, *(f"--{key}={value}" for key, value in options.items())], stderr=log)
    try:
        assert until(lambda: socket.create_connection(("127.0.0.1", port)).close() is None), (
            tmp_path / "log"
        ).read_text()
        (sink,) = open_sinks(StatLoggerConfig(otlp=f"http://127.0.0.1:{port}"), RUN)
        sink.write([line()])
        sink.write([line()])
        sink.close()

        def points() -> dict[str, Any]:
            requests = [service.ExportMetricsServiceRequest.FromString(body) for _, body in server.bodies]
            scopes = [
                scope
                for request in requests
                for resource in request.resource_metrics
                for scope in resource.scope_metrics
            ]
            return {metric.name: metric for scope in scopes for metric in scope.metrics}

        def whole() -> dict[str, Any] | None:
            there = points()
            tokens = there.get("vllm.generation_tokens")
            return there if tokens and tokens.sum.data_points[-1].as_int == 84 else None

        metrics = until(whole)
        assert metrics, (tmp_path / "log").read_text()
        assert metrics["vllm.generation_tokens"].sum.is_monotonic
        assert metrics["vllm.kv_cache_usage_perc"].gauge.data_points[-1].as_double == 0.25
        histogram = metrics["vllm.time_to_first_token_seconds"].exponential_histogram.data_points[-1]
        assert histogram.count == sum(histogram.positive.bucket_counts) == 2000
    finally:
        collector.terminate()
        collector.wait(timeout=60)


STATSD = "{{port: {port}, address: '127.0.0.1', mgmt_port: {admin}, mgmt_address: '127.0.0.1', backends: [], flushInterval: 600000}}"


def asked(port: int, question: str) -> dict[str, float]:
    """Return what StatsD's port for administrators answers, which is an object of JavaScript."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(f"{question}\n".encode())
        said = ""
        while "END" not in said:
            said += link.recv(65536).decode()
    pairs = (line.strip(" ,{}").rpartition(":") for line in said.splitlines())
    return {name.strip(" '"): float(value) for name, _, value in pairs if name.strip(" '").startswith("vllm.")}


@pytest.mark.nightly
def test_statsd_counts_the_increments_and_keeps_the_gauges(tmp_path: Path) -> None:
    pytest.importorskip("statsd")
    install = [program("npm"), "install", "--silent", "--no-optional", "--prefix", str(tmp_path), "statsd@0.9.0"]
    if subprocess.run(install, check=False, env=os.environ | {"HOME": str(tmp_path)}).returncode:
        pytest.skip("StatsD's server cannot be installed here (npm install statsd)")
    port, admin = free_port(), free_port()
    (tmp_path / "config.js").write_text(STATSD.format(port=port, admin=admin))
    command = [program("node"), str(tmp_path / "node_modules/statsd/stats.js"), str(tmp_path / "config.js")]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert until(lambda: asked(admin, "counters") is not None)
        (sink,) = open_sinks(StatLoggerConfig(statsd=f"127.0.0.1:{port}"), RUN)
        sink.write([line()])
        sink.write([line()])
        sink.close()
        counters = until(
            lambda: (found := asked(admin, "counters")).get("vllm.engine_0.generation_tokens") == 84 and found
        )
        assert counters["vllm.engine_0.request_success.length"] == 6
        gauges = asked(admin, "gauges")
        assert gauges["vllm.engine_0.kv_cache_usage_perc"] == 0.25
        assert gauges["vllm.engine_0.time_to_first_token_seconds_p99"] == pytest.approx(0.99, rel=0.01)
    finally:
        server.terminate()
        server.wait(timeout=60)
