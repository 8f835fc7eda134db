"""The background half: nothing is lost, nothing blocks, nothing grows."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from vllm.v1.metrics.stats import MultiModalCacheStats, SchedulerStats

from npu_statlogger import recorder as recorder_module
from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.lines import Note
from npu_statlogger.reading import read_lines, read_snapshots
from npu_statlogger.recorder import QUEUE_LIMIT, Recorder
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.metrics.stats import IterationStats


def total(path: Path) -> Snapshot:
    whole = Snapshot()
    for snapshot in read_snapshots(path):
        assert isinstance(snapshot, Snapshot)
        whole.merge(snapshot)
    return whole


def test_closing_writes_what_is_left_once(path: Path, iteration_stats: IterationStats) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    recorder.put(None, iteration_stats, None)
    recorder.close()
    recorder.close()
    lines = list(read_snapshots(path))
    assert len(lines) == 1
    assert total(path).counters["generation_tokens"] == 3
    assert total(path).models == {"m"}
    assert total(path).processes == {f"{os.uname().nodename}:{os.getpid()}"}


def test_either_record_may_be_none(
    path: Path, iteration_stats: IterationStats, scheduler_stats: SchedulerStats
) -> None:
    recorder = Recorder(StatLoggerConfig(path), "m")
    recorder.put(None, None, None)
    recorder.put(scheduler_stats, None, None)
    recorder.put(None, iteration_stats, None)
    recorder.close()
    assert total(path).counters["scheduler_steps"] == 1
    assert total(path).counters["request_success.length"] == 1
    assert "records_failed" not in total(path).counters


def test_each_engine_has_a_line_also_when_idle_and_the_rest_another(
    path: Path, iteration_stats: IterationStats, scheduler_stats: SchedulerStats
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m", engines=[0, 1])
    recorder.put(scheduler_stats, iteration_stats, MultiModalCacheStats(queries=4, hits=1), engine=1)
    recorder.put_event("admission_rejections.max_num_queued_reqs")
    recorder.put(scheduler_stats, None, None, engine=2)  # an engine that came later
    recorder.close()
    lines = {tuple(snapshot.engines): snapshot for snapshot in read_snapshots(path) if isinstance(snapshot, Snapshot)}
    assert lines.keys() == {(0,), (1,), (2,), ()}
    assert not lines[0,]
    assert lines[1,].counters["generation_tokens"] == 3
    assert lines[2,].counters == {
        "scheduler_steps": 1, "prefix_cache_queries": 100, "prefix_cache_hits": 60, "prefix_cache_requests": 1,
        "prompt_tokens_cached_by_source.device": 60,
    }  # fmt: skip
    assert lines[()].counters == {
        "admission_rejections.max_num_queued_reqs": 1,
        "mm_cache_queries": 4,
        "mm_cache_hits": 1,
    }
    assert total(path).engines == {0, 1, 2}
    assert total(path).counters["scheduler_steps"] == 2


def test_an_idle_server_writes_no_lines(path: Path) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=0.001), "m")
    recorder.close()
    assert path.read_bytes() == b""


def test_lines_of_short_intervals_add_up(path: Path, iteration_stats: IterationStats) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=0.001), "m")
    for _ in range(200):
        recorder.put(None, iteration_stats, None)
    recorder.close()
    assert total(path).counters["generation_tokens"] == 600
    assert total(path).distributions["inter_token_latency_seconds"].count == 400


def test_a_record_of_an_unknown_shape_is_counted_and_the_rest_goes_on(
    path: Path, iteration_stats: IterationStats
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    broken = type(iteration_stats)()
    broken.finished_requests = 3
    recorder.put(None, broken, None)
    recorder.put(None, iteration_stats, None)
    recorder.close()
    assert total(path).counters["records_failed"] == 1
    assert total(path).counters["request_success.length"] == 1


def test_a_finished_request_of_an_unknown_shape_does_not_end_the_thread(
    path: Path, iteration_stats: IterationStats
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    iteration_stats.finished_requests[0].num_cached_tokens = "many"
    recorder.put(None, iteration_stats, None)
    recorder._fold()
    iteration_stats.finished_requests = []
    recorder.put(None, iteration_stats, None)
    recorder.close()
    assert total(path).counters["records_failed"] == 1
    assert total(path).counters["generation_tokens"] >= 3


def test_a_latency_that_is_no_number_is_counted_and_left_out(path: Path, iteration_stats: IterationStats) -> None:
    iteration_stats.time_to_first_tokens_iter = [0.5, float("nan")]
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    recorder.put(None, iteration_stats, None)
    recorder.close()
    assert total(path).counters["values_not_finite"] == 1
    assert total(path).distributions["time_to_first_token_seconds"].count == 1


def test_an_adapter_that_is_idle_is_0_in_the_line_in_which_it_became_so(path: Path) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m", engines=[0, 1])
    for engine in (0, 1):
        recorder.put(SchedulerStats(running_lora_adapters={"sql": 1}), None, None, engine)
    recorder._fold()
    recorder._publish()
    recorder.put(SchedulerStats(), None, None, 0)
    recorder.put(SchedulerStats(running_lora_adapters={"sql": 2}), None, None, 1)
    recorder.close()
    assert total(path).gauge("lora_requests_running.sql") == {"0": 0.0, "1": 2.0}


def test_a_gauge_that_is_no_number_costs_nothing_else(path: Path, iteration_stats: IterationStats) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    recorder.put(SchedulerStats(kv_cache_usage=float("nan")), iteration_stats, None)
    recorder.close()
    assert total(path).counters["values_not_finite"] == 1
    assert total(path).counters["generation_tokens"] == 3


def test_a_connector_s_whole_number_of_numpy_reaches_the_file(path: Path) -> None:
    payload = {"types": {"vllm:my_blocks": "counter"}, "data": {"vllm:my_blocks": {(): np.int64(3)}}}
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    for _ in range(2):
        recorder.put(SchedulerStats(kv_connector_stats=payload), None, None)
    recorder.close()
    assert total(path).counters["my_blocks"] == 6


def test_an_interval_need_not_be_whole_seconds(path: Path) -> None:
    recorder, begun = Recorder(StatLoggerConfig(path, interval=1.5), "m"), time.monotonic()
    while time.monotonic() < begun + 3.4:
        recorder.put_event("num_preemptions")
        time.sleep(0.02)
    recorder.close()
    lines = [line.seconds for line in read_snapshots(path) if isinstance(line, Snapshot) and line]
    assert lines[:2] == pytest.approx([1.5, 1.5], abs=0.4)


def test_a_full_queue_counts_what_it_drops(
    path: Path, scheduler_stats: SchedulerStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FOLD_SECONDS", 3600)
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    for _ in range(QUEUE_LIMIT + 5):
        recorder.put(scheduler_stats, None, None)
    recorder.close()
    assert total(path).counters["scheduler_steps"] == QUEUE_LIMIT
    assert total(path).counters["records_dropped"] == 5


def test_events_are_counted(path: Path) -> None:
    recorder = Recorder(StatLoggerConfig(path), "m")
    recorder.put_event("admission_rejections.max_num_queued_reqs")
    recorder.close()
    assert total(path).counters == {"admission_rejections.max_num_queued_reqs": 1}


def test_a_recorder_needs_a_path() -> None:
    with pytest.raises(ValueError, match="needs a path or another sink"):
        Recorder(StatLoggerConfig(), "m")


def test_a_clock_that_is_set_back_is_noted_and_no_span_is_negative(
    path: Path, scheduler_stats: SchedulerStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    recorder.put(scheduler_stats, None, None)
    now = time.time()
    monkeypatch.setattr(recorder_module.time, "time", lambda: now - 7200)
    recorder.close()
    monkeypatch.undo()
    note, snapshot = (line for line in read_lines(path) if isinstance(line, Note | Snapshot) and line)
    if isinstance(note, Snapshot):
        note, snapshot = snapshot, note
    assert isinstance(note, Note)
    assert isinstance(snapshot, Snapshot)
    assert note.name == "clock_jumped"
    assert note.values["seconds"] == pytest.approx(-7200, abs=60)
    assert "set back by 7" in note.text
    assert snapshot.end == pytest.approx(now - 7200, abs=60)
    assert 0 <= snapshot.seconds < 60


def test_lines_of_requests_and_steps_come_before_the_interval_ends(
    path: Path, scheduler_stats: SchedulerStats, iteration_stats: IterationStats
) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600, requests=1.0, steps=1.0), "m")
    recorder.put(scheduler_stats, iteration_stats, None)
    deadline = time.monotonic() + 60
    while path.read_bytes().count(b"\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [line.kind for line in read_lines(path)] == ["run", "step", "request"]  # type: ignore[union-attr]
    recorder.close()
    assert total(path).counters["request_success.length"] == 1


def test_lines_that_a_sink_dropped_are_counted_in_every_sink(path: Path, tmp_path: Path) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600, sqlite=tmp_path / "stats.db"), "m")
    recorder._count_dropped("sqlite", 3)
    recorder.close()
    assert total(path).counters["sink_lines_dropped.sqlite"] == 3


def test_a_forked_child_closes_nothing_of_its_parent(path: Path, scheduler_stats: SchedulerStats) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    recorder.put(scheduler_stats, None, None)
    child = os.fork()
    if not child:
        recorder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b""
    recorder.close()
    assert total(path).counters["scheduler_steps"] == 1


@pytest.mark.parametrize("requests", [200_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_many_requests_in_constant_memory(requests: int, path: Path, iteration_stats: IterationStats) -> None:
    recorder = Recorder(StatLoggerConfig(path, interval=3600), "m")
    iteration_stats.finished_requests *= 1000
    sizes = []
    for _ in range(10):
        for _ in range(requests // 10_000):
            recorder.put(None, iteration_stats, None)
        recorder._fold()
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    recorder.close()
    assert total(path).counters["request_success.length"] == requests
    assert sizes[-1] - sizes[2] < 4 << 20
