"""The class as vLLM loads and drives it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager, load_stat_logger_plugin_factories

import npu_statlogger
from npu_statlogger import NPUStatLogger
from npu_statlogger.errors import ConfigError
from tests.support.vllm_process import run_program

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

WITHOUT_VLLM = """
import importlib.abc, sys
class NoVllm(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoVllm())
import npu_statlogger
from npu_statlogger.cli import main
try:
    npu_statlogger.NPUStatLogger
except ImportError as error:
    print(error)
"""

EXIT_WITHOUT_CLOSING = """
import sys
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import SchedulerStats
from npu_statlogger import NPUStatLogger
logger = NPUStatLogger(VllmConfig(additional_config={"npu_statlogger": {"path": sys.argv[1], "interval": 3600}}), [0])
logger.record(SchedulerStats(num_running_reqs=7), None)
"""

FORKED_WITHOUT_CLOSING = """
import multiprocessing, sys
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import SchedulerStats
from npu_statlogger import NPUStatLogger
def serve():
    global logger
    logger = NPUStatLogger(VllmConfig(additional_config={"npu_statlogger": {"path": sys.argv[1], "interval": 3600}}), [0])
    logger.record(SchedulerStats(num_running_reqs=7), None)
process = multiprocessing.get_context("fork").Process(target=serve)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def vllm_config(**section: object) -> VllmConfig:
    return VllmConfig(additional_config={"npu_statlogger": section} if section else {})


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "npu-statlogger"]


def test_vllm_finds_the_class_through_the_entry_point() -> None:
    factories = load_stat_logger_plugin_factories()
    assert NPUStatLogger in factories
    assert issubclass(NPUStatLogger, AggregateStatLoggerBase)


def test_vllm_s_manager_drives_one_instance_for_all_engines(
    path: Path, scheduler_stats: SchedulerStats, iteration_stats: IterationStats
) -> None:
    config = vllm_config(path=str(path))
    # The manager's constructor always adds the Prometheus logger, which needs a model; the calls it makes need none.
    manager = StatLoggerManager.__new__(StatLoggerManager)
    manager.stat_loggers = [NPUStatLogger(vllm_config=config, engine_indexes=[0, 1])]
    manager.log_engine_initialized()
    manager.record(scheduler_stats, iteration_stats, engine_idx=0)
    manager.record(scheduler_stats, None, engine_idx=1)
    manager.record(None, None)
    manager.record_sleep_state(1, 2)
    manager.record_sleep_state(0, 0)
    manager.record_admission_rejection("max_num_queued_reqs")
    manager.log()
    manager.stat_loggers.clear()
    gc.collect()
    run, first, second, front_end = (json.loads(line) for line in path.read_text().splitlines())
    assert (run["kind"], run["engines"], run["settings"]["interval"]) == ("run", [0, 1], 10)
    assert (first["engines"], second["engines"], front_end["engines"]) == ([0], [1], [])
    assert first["counters"]["scheduler_steps"] == second["counters"]["scheduler_steps"] == 1
    assert first["counters"]["request_success.length"] == 1
    assert "request_success.length" not in second["counters"]
    assert front_end["counters"] == {
        "admission_rejections.max_num_queued_reqs": 1,
        "sleep_events.awake": 1,
        "sleep_events.level_2": 1,
    }
    assert {name: value for name, (_, value) in front_end["gauges"][""].items()} == {
        "engine_sleep_state.awake": 1, "engine_sleep_state.weights_offloaded": 0, "engine_sleep_state.discard_all": 0,
    }  # fmt: skip
    assert first["distributions"]["time_to_first_token_seconds"]["p99"] == pytest.approx(0.5, rel=0.01)


def test_off_means_no_thread_no_file_and_nothing_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler_stats: SchedulerStats, iteration_stats: IterationStats
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = NPUStatLogger(vllm_config(), [0])
    references = sys.getrefcount(scheduler_stats)
    logger.record(scheduler_stats, iteration_stats)
    logger.record_sleep_state(1, 1)
    logger.record_admission_rejection("max_num_queued_reqs")
    assert sys.getrefcount(scheduler_stats) == references
    assert threads() == []
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_setting_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="did you mean 'path'"):
        NPUStatLogger(vllm_config(paths="x"), [0])


def test_a_directory_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NPUStatLogger(vllm_config(path=str(tmp_path / "missing" / "stats.jsonl")), [0])
    assert threads() == []


@pytest.mark.parametrize("program", [EXIT_WITHOUT_CLOSING, FORKED_WITHOUT_CLOSING], ids=["started", "forked"])
def test_a_process_that_only_exits_writes_its_last_line(path: Path, program: str) -> None:
    done = run_program(program, str(path))
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text().splitlines()[1])["distributions"]["num_requests_running"]["max"] == 7


def test_without_vllm_the_package_imports_and_the_class_says_what_to_do() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM], check=True, capture_output=True, text=True, timeout=300
    )
    assert "vLLM is not installed" in result.stdout
    assert result.stdout.count("\n") == 1


def test_what_comes_after_the_end_is_not_kept(path: Path, scheduler_stats: SchedulerStats) -> None:
    logger = NPUStatLogger(vllm_config(path=str(path)), [0])
    logger.record(scheduler_stats, None)
    logger.close()
    logger.close()
    logger.record(scheduler_stats, None)
    logger.record_sleep_state(1, 1)
    logger.record_admission_rejection("max_num_queued_reqs")
    assert threads() == []
    assert path.read_text().count('"kind":"interval"') == 1


@dataclass
class Engine:
    """What `attach` needs of vLLM's LLMEngine; tests/integration/test_statlogger.py attaches to a real one."""

    vllm_config: VllmConfig
    logger_manager: StatLoggerManager | None


def test_attaching_needs_an_engine_that_measures_and_a_place() -> None:
    manager = StatLoggerManager.__new__(StatLoggerManager)
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        npu_statlogger.attach(SimpleNamespace(llm_engine=Engine(vllm_config(), None)), path="x")
    with pytest.raises(ConfigError, match="attach\\(llm, path='stats.jsonl'\\)"):
        npu_statlogger.attach(SimpleNamespace(llm_engine=Engine(vllm_config(), manager)))


def test_public_names() -> None:
    assert dir(npu_statlogger) == ["NPUStatLogger", "attach"]
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        npu_statlogger.Other  # noqa: B018
