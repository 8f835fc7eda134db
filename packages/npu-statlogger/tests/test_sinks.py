"""Every sink against the real thing: its library reads back what was written, a server gets what was sent."""

from __future__ import annotations

import csv
import json
import socket
import sqlite3
import struct
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npu_statlogger.config import SINKS, StatLoggerConfig
from npu_statlogger.errors import ConfigError
from npu_statlogger.lines import RequestLine, Run
from npu_statlogger.reading import read_lines
from npu_statlogger.sinks import open_sinks
from npu_statlogger.sinks.figures import LABEL_LIMIT, Cumulative, flat
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_statlogger.sinks.base import Sink

RUN = Run(
    time=1.0, process="host:1", model="m", versions={"vllm": "0.32.0", "npu-statlogger": "1"}, engines=[0], settings={}
)
REQUEST = RequestLine(
    time=1.5, process="host:1", model="m", engine=1, request_id="ab", arrival=0.5, finish_reason="stop", e2e_seconds=1.0,
    queue_seconds=0.25, prefill_seconds=0.25, decode_seconds=0.5, inference_seconds=0.75, first_token_seconds=0.5,
    time_per_output_token_seconds=0.25, prompt_tokens=7, cached_tokens=4, generation_tokens=3, max_tokens=0,
    preemptions=0, corrupted=0, weight=4.0,
)  # fmt: skip
LATENCIES = [0.001 * number for number in range(1, 1001)]


def interval(engine: int | None = 0, tokens: int = 3) -> Snapshot:
    line = Snapshot(start=1000.0, end=1010.0, processes={"host:1"}, models={"m"})
    line.engines = set() if engine is None else {engine}
    line.counters = Counter({"generation_tokens": tokens, "request_success.length": 2})
    line.totals_nano = Counter({"kv_offload_load_time": 1_500_000_000})
    line.gauges["" if engine is None else str(engine)] = {"num_requests_running": (1009.0, 4.0)}
    line.distributions["time_to_first_token_seconds"].add(LATENCIES)
    line.distributions["num_requests_running"].add([1, 2, 3])
    return line


def open_one(**settings: Any) -> Sink:
    (sink,) = open_sinks(StatLoggerConfig(**settings), RUN)
    return sink


def test_a_flat_row_has_every_figure_and_percentiles_within_the_error() -> None:
    row = flat(interval())
    assert row["generation_tokens"] == 3
    assert row["kv_offload_load_time"] == 1.5
    assert row["num_requests_running"] == 4
    assert row["num_requests_running_mean"] == 2
    assert row["time_to_first_token_seconds_count"] == 1000
    assert row["time_to_first_token_seconds_p99"] == pytest.approx(0.99, rel=0.01)
    assert row["generation_tokens_per_second"] == pytest.approx(0.3)


def test_a_label_of_too_many_values_ends_at_a_limit_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    figures = Cumulative()
    line = interval()
    line.gauges["0"] = {f"lora_requests_running.adapter-{number}": (1.0, 1.0) for number in range(LABEL_LIMIT + 50)}
    figures.add([line])
    for _ in range(2):
        assert sum(series.name == "lora_requests_running" for series in figures.series()) == LABEL_LIMIT
    assert caplog.text.count("others are left out") == 1


def test_json_lines_hold_every_kind(path: Path) -> None:
    sink = open_one(path=path)
    sink.write([interval(), REQUEST])
    sink.close()
    assert [type(line).__name__ for line in read_lines(path)] == ["Run", "Snapshot", "RequestLine"]


def test_a_line_that_json_cannot_say_is_left_out_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = open_one(path=path)
    line = interval()
    line.gauges["0"]["kv_cache_usage_perc"] = (1.0, float("nan"))
    sink.write([line, interval()])
    assert [type(line).__name__ for line in read_lines(path)] == ["Run", "Snapshot"]
    assert "A line of kind interval was left out" in caplog.text


def test_a_line_of_a_type_that_json_has_not_is_left_out_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = open_one(path=path)
    line = interval()
    line.counters["blocks"] = np.int64(3)  # type: ignore[assignment]
    sink.write([line, interval()])
    assert [type(line).__name__ for line in read_lines(path)] == ["Run", "Snapshot"]
    assert "A line of kind interval was left out" in caplog.text


def test_csv_rows_are_read_by_csv_and_the_header_stands_once(path: Path) -> None:
    for _ in range(2):
        sink = open_one(csv=path)
        sink.write([interval(0), REQUEST, interval(None)])
        sink.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert path.read_text().count("schema,start") == 1
    assert {(row["engine"], row["process"], row["model"]) for row in rows} == {
        ("0", "host:1", "m"),
        ("", "host:1", "m"),
    }
    assert [row["value"] for row in rows if row["figure"] == "generation_tokens"] == ["3.0"] * 4


def test_a_torn_header_of_csv_is_written_again_where_half_of_it_says_whose_it_is(path: Path) -> None:
    open_one(csv=path).write([interval()])
    whole = path.read_bytes()
    header = whole[: whole.index(b"\n") + 1]
    for size in range(1, len(header)):
        path.write_bytes(header[:size])
        if 2 * size < len(header):
            with pytest.raises(ConfigError, match="holds something else"):
                open_one(csv=path)
            assert path.read_bytes() == header[:size]
        else:
            open_one(csv=path).write([interval()])
            assert path.read_bytes() == whole


def test_a_torn_row_of_csv_is_cut_off_by_the_next_writer(path: Path) -> None:
    open_one(csv=path).write([interval()])
    whole = path.read_text()
    path.write_text(whole + "npu-statlogger/2,1000.0,10")
    open_one(csv=path).write([interval()])
    assert path.read_text().startswith(whole + "npu-statlogger/2,1000.0,1010.0,")
    assert len({len(row) for row in csv.reader(path.read_text().splitlines())}) == 1


def test_sqlite_answers_queries_while_two_processes_write(path: Path) -> None:
    sinks = [open_one(sqlite=path) for _ in range(2)]
    for sink in sinks:
        sink.write([interval(), REQUEST])
    reader = sqlite3.connect(path)
    assert reader.execute("SELECT sum(value) FROM figures WHERE figure = 'generation_tokens'").fetchone() == (6,)
    assert (
        reader.execute("SELECT engine, prompt_tokens, finish_reason FROM requests").fetchall() == [(1, 7, "stop")] * 2
    )
    assert json.loads(reader.execute("SELECT versions FROM runs").fetchone()[0]) == RUN.versions
    for sink in sinks:
        sink.close()


def test_sqlite_takes_all_or_nothing(path: Path) -> None:
    sink = open_one(sqlite=path)
    broken = Run(time=1.0, process="h:1", model="m", versions={}, engines=[], settings={"x": 1})
    broken.process = object()  # type: ignore[assignment] # what SQLite cannot store
    with pytest.raises(sqlite3.Error):
        sink.write([interval(), broken])
    assert sqlite3.connect(path).execute("SELECT count(*) FROM figures").fetchone() == (0,)
    sink.write([interval()])
    assert sqlite3.connect(path).execute("SELECT count(*) FROM figures").fetchone()[0] > 10


@pytest.mark.parametrize("content", ["letter", "database"])
def test_a_file_of_somebody_else_is_no_database_of_ours(path: Path, content: str) -> None:
    if content == "letter":
        path.write_text("Dear database," * 100)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE letters (text)")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="statistics go to a new SQLite database"):
        open_one(sqlite=path)
    assert path.read_bytes() == before


def test_parquet_is_read_by_pyarrow(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    sink = open_one(parquet=tmp_path / "tables")
    sink.write([interval(), REQUEST])
    assert list((tmp_path / "tables").iterdir()) == []
    sink.close()
    tables = {file.name.partition("-")[0]: pq.read_table(file) for file in (tmp_path / "tables").iterdir()}
    assert tables.keys() == {"figures", "requests", "runs"}
    assert tables["requests"].to_pylist()[0]["prompt_tokens"] == 7
    figures = {row["figure"]: row["value"] for row in tables["figures"].to_pylist()}
    assert figures["generation_tokens"] == 3


def test_parquet_that_cannot_be_written_is_brought_again_and_not_doubled(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    directory = tmp_path / "tables"
    sink = open_one(parquet=directory)
    sink._due = 0.0  # type: ignore[attr-defined]
    moved = directory.rename(tmp_path / "gone")
    with pytest.raises(OSError, match="No such file"):
        sink.write([interval()])
    moved.rename(directory)
    sink.write([interval()])
    rows = [row for file in directory.glob("figures-*") for row in pq.read_table(file).to_pylist()]
    assert sum(row["figure"] == "generation_tokens" for row in rows) == 1
    assert len(list(directory.glob("runs-*"))) == 1


def families_at(port: int) -> dict[str, Any]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_prometheus_scrapes_counters_gauges_and_true_percentiles() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sink = open_one(prometheus=f"127.0.0.1:{port}")  # the next free one, as for a second API server
    served = sink._server[0].server_port  # type: ignore[attr-defined]
    assert served != port
    sink.write([interval(0), interval(1)])
    sink.write([interval(0)])
    families = families_at(served)
    tokens = {sample.labels["engine"]: sample.value for sample in families["npu_statlogger_generation_tokens"].samples}
    assert tokens == {"0": 6, "1": 3}
    (reason, *_) = families["npu_statlogger_request_success"].samples
    assert (reason.labels["finished_reason"], reason.labels["model_name"], reason.value) == ("length", "m", 4)
    first = {
        sample.labels.get("quantile", sample.name.rpartition("_")[2]): sample.value
        for sample in families["npu_statlogger_time_to_first_token_seconds"].samples
        if sample.labels["engine"] == "0"
    }
    assert first["count"] == 2000
    assert first["sum"] == pytest.approx(2 * sum(LATENCIES))
    assert first["0.99"] == pytest.approx(0.99, rel=0.01)
    assert families["npu_statlogger_num_requests_running"].type == "gauge"
    assert families["npu_statlogger_num_requests_running_per_step"].type == "summary"
    sink.close()
    with pytest.raises(OSError, match="refused"):
        families_at(served)


def test_prometheus_says_where_it_serves_also_on_a_port_of_the_system_s_choice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("prometheus_client")
    hosts = ["127.0.0.1", *(["[::1]"] if has_ipv6() else [])]
    for host in hosts:
        caplog.clear()
        with caplog.at_level("INFO"):
            sink = open_one(prometheus=f"{host}:0")
        served = sink._server[0].server_port  # type: ignore[attr-defined]
        assert f"http://{host}:{served}/metrics" in caplog.text
        with urllib.request.urlopen(f"http://{host}:{served}/metrics", timeout=30) as answer:
            assert answer.status == 200
        sink.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_prometheus_without_a_port_left_says_so() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 65535)), pytest.raises(OSError, match="from 65535 to 65535 taken; name"):
        open_one(prometheus="127.0.0.1:65535")


def test_prometheus_on_a_host_that_is_not_known_or_not_here_says_so_at_once() -> None:
    pytest.importorskip("prometheus_client")
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(OSError, match=f"cannot serve at {host}, port 9100: .*; name another"):
            open_one(prometheus=f"{host}:9100")


def test_prometheus_beside_vllm_s_own_metrics_is_refused_where_they_come_from_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    sink = open_one(prometheus="vllm")
    sink.write([interval()])
    assert (
        prometheus_client.REGISTRY.get_sample_value(
            "npu_statlogger_generation_tokens_total", {"engine": "0", "model_name": "m"}
        )
        == 3
    )
    sink.close()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        open_one(prometheus="vllm")


def test_a_push_replaces_the_figures_and_one_that_fails_is_made_up_for(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    sink = open_one(push=f"http://127.0.0.1:{server.server_port}")
    server.status = 500
    sink.write([interval()])
    assert "could not be sent to push" in caplog.text
    server.status = 200
    sink.write([interval()])
    sink.close()
    assert {path for path, _ in server.bodies} == {"/metrics/job/vllm/instance/host%3A1"} or {
        path for path, _ in server.bodies
    } == {"/metrics/job/vllm/instance/host:1"}
    families = {family.name: family for family in parser.text_string_to_metric_families(server.bodies[-1][1].decode())}
    assert families["npu_statlogger_generation_tokens"].samples[0].value == 6


def test_otlp_reaches_a_receiver_with_sums_gauges_and_exponential_histograms(server: Any) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    from npu_statlogger.sinks.otlp import ERROR

    sink = open_one(otlp=f"http://127.0.0.1:{server.server_port}")
    sink.write([interval(0), interval(1)])
    sink.write([interval(0)])
    sink.close()
    assert {path for path, _ in server.bodies} == {"/v1/metrics"}
    request = service.ExportMetricsServiceRequest.FromString(server.bodies[-1][1])
    (resource,) = request.resource_metrics
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "vllm"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    tokens = metrics["vllm.generation_tokens"].sum
    assert tokens.is_monotonic
    assert [point.as_int for point in tokens.data_points] == [6, 3]
    assert metrics["vllm.num_requests_running"].gauge.data_points[0].as_double == 4
    histogram = metrics["vllm.time_to_first_token_seconds"].exponential_histogram.data_points[0]
    assert histogram.count == sum(histogram.positive.bucket_counts) == 2000
    assert (histogram.min, histogram.max) == (0.001, 1.0)
    assert median(histogram) == pytest.approx(0.5, rel=ERROR)


def median(histogram: Any) -> float:
    """Return the middle of the bucket of the median, as receivers do."""
    left, base = histogram.count // 2, 2**2**-histogram.scale
    for index, count in enumerate(histogram.positive.bucket_counts, start=histogram.positive.offset):
        left -= count
        if left <= 0:
            return (base**index + base ** (index + 1)) / 2
    raise AssertionError


def test_a_collector_that_is_not_there_is_told_once_and_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sink = open_one(otlp=f"http://127.0.0.1:{port}")
    sink._exporter._timeout = 0.2  # type: ignore[attr-defined]
    sink.write([interval()])
    said = len(caplog.records)
    sink.write([interval()])
    assert caplog.text.count("could not be sent to otlp") == 1
    assert "refused" in caplog.text
    assert len(caplog.records) == said


def test_statsd_gets_increments_and_gauges() -> None:
    pytest.importorskip("statsd")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(10)
        sink = open_one(statsd=f"127.0.0.1:{receiver.getsockname()[1]}")
        sink.write([interval(0), REQUEST, interval(None)])
        sink.close()
        received: list[str] = []
        while "vllm.front_end.generation_tokens:3|c" not in received:
            received += receiver.recv(65536).decode().split("\n")
    assert {"vllm.engine_0.generation_tokens:3|c", "vllm.engine_0.request_success.length:2|c"} <= set(received)
    assert "vllm.engine_0.num_requests_running:4.0|g" in received
    (first,) = [line for line in received if line.startswith("vllm.engine_0.time_to_first_token_seconds_p99:")]
    assert float(first.partition(":")[2].partition("|")[0]) == pytest.approx(0.99, rel=0.01)


def test_tensorboard_reads_its_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_one(tensorboard=tmp_path / "events")
    sink.write([interval(tokens=3)])
    sink.write([interval(tokens=5), interval(None)])
    sink.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("engine_0/generation_tokens")] == [(1, 3), (2, 5)]
    assert events.Scalars("front_end/time_to_first_token_seconds_p99")[0].value == pytest.approx(0.99, rel=0.01)


WANDB = """
import sys
from pathlib import Path
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.lines import Run
from npu_statlogger.sinks import open_sinks
from npu_statlogger.snapshot import Snapshot
run = Run(time=1.0, process="host:1", model="m", versions={}, engines=[0], settings={"interval": 10})
(sink,) = open_sinks(StatLoggerConfig(wandb=Path(sys.argv[1])), run)
for tokens in (3, 5):
    line = Snapshot(start=0, end=tokens, engines={0})
    line.counters["generation_tokens"] = tokens
    sink.write([line])
sink.close()
"""


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a run's file: LevelDB's log, behind a header of 7 bytes, in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:  # the rest of the block is empty
            position += 32768 - position % 32768
            continue
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        if kind in (1, 4):  # whole, or a last part
            yield record
            record = b""


def test_an_offline_run_of_wandb_holds_the_figures_and_is_ready_to_be_sent(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], check=True, timeout=300)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [wandb_internal_pb2.Record.FromString(record) for record in records_of(file.read_bytes())]
    values = [
        json.loads(item.value_json)
        for record in records
        for item in record.history.item
        if (item.key or "/".join(item.nested_key)) == "engine_0/generation_tokens"
    ]
    assert values == [3, 5]
    assert any(record.WhichOneof("record_type") == "exit" for record in records)
    sync = [str(Path(sys.executable).with_name("wandb")), "sync", "--dry-run", str(file.parent)]
    said = subprocess.run(sync, check=True, capture_output=True, text=True)
    assert str(file) in said.stdout + said.stderr


WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyarrow", "prometheus_client", "opentelemetry", "tensorboard", "wandb", "statsd"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from pathlib import Path
from npu_statlogger.config import SINKS, StatLoggerConfig
from npu_statlogger.errors import ConfigError
from npu_statlogger.lines import Run
from npu_statlogger.sinks import open_sinks
run = Run(time=1.0, process="host:1", model="m", versions={}, engines=[0], settings={})
for name in SINKS:
    place = {"prometheus": "h:1", "statsd": "h:1", "push": "http://h", "otlp": "http://h"}.get(name, Path(f"place-{name}"))
    try:
        open_sinks(StatLoggerConfig(**{name: place}), run)
        print(name, "works")
    except ConfigError as error:
        print(name, error)
"""


def test_without_its_library_a_sink_says_what_to_install_and_the_others_work(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], check=True, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.keys() == set(SINKS)
    needing = {name for name, text in said.items() if f"pip install 'npu-statlogger[{name}]'" in text}
    assert needing == {"parquet", "prometheus", "push", "otlp", "tensorboard", "wandb", "statsd"}
    assert {name for name, text in said.items() if text == "works"} == set(SINKS) - needing


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("setting", ["path", "csv", "sqlite", "parquet", "tensorboard", "wandb"])
def test_a_place_that_cannot_be_written_says_what_to_do(setting: str, tmp_path: Path) -> None:
    pytest.importorskip({"parquet": "pyarrow", "path": "csv"}.get(setting, setting.replace("sqlite", "sqlite3")))
    file = tmp_path / "file"
    file.touch()
    wrong = {file / "x": "a file stands where a folder should"}
    if setting in ("path", "csv", "sqlite"):
        wrong |= {
            tmp_path / "none" / "x": "make the folder that it is to be in",
            tmp_path: "it is a folder; name a file",
        }
    else:
        wrong |= {file: "a file stands where a folder should"}
    for place, remedy in wrong.items():
        with pytest.raises(OSError, match=rf"^npu_statlogger: {setting}={place} cannot be written \(.*\): {remedy}"):
            open_one(**{setting: place})


def test_if_one_sink_cannot_be_opened_those_before_it_are_closed(path: Path) -> None:
    before = open_files()
    with pytest.raises(OSError, match="Not a directory"):
        open_sinks(StatLoggerConfig(path=path, sqlite=path / "x"), RUN)
    assert open_files() == before
