"""Real programs of Prometheus take what is served and pushed; where they are not installed, these tests are skipped."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.lines import Run
from npu_statlogger.sinks import open_sinks
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("prometheus_client")
RUN = Run(time=1.0, process="host:1", model="m", versions={}, engines=[0], settings={})
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
