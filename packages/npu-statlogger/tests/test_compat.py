"""What goes around vLLM: needed as long as vLLM is as it was found, and it works on vLLM's own classes."""

from __future__ import annotations

import gc
import inspect
import time
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager

from npu_statlogger import NPUStatLogger
from npu_statlogger.compat import managers_without_plugins
from npu_statlogger.reading import read_snapshots
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.metrics.stats import SchedulerStats


def manager(engines: list[int]) -> StatLoggerManager:
    # Its constructor adds the Prometheus logger, which needs a model.
    made = StatLoggerManager.__new__(StatLoggerManager)
    made.engine_indexes, made.stat_loggers = engines, []
    return made


def test_elastic_scaling_still_drops_the_loggers_of_plugins() -> None:
    source = inspect.getsource(AsyncLLM._scale_elastic_ep)
    assert "custom_stat_loggers=None" in source, "vLLM passes them on: compat.managers_without_plugins can go"


def test_only_a_larger_set_of_engines_is_a_successor() -> None:
    kept = [manager([0, 1]), manager([0]), manager([2, 3, 4]), manager([0, 1, 2])]
    assert managers_without_plugins([0, 1]) == [kept[3]]


def test_statistics_go_on_in_the_manager_that_scaling_makes(path: Path, scheduler_stats: SchedulerStats) -> None:
    config = VllmConfig(additional_config={"npu_statlogger": {"path": str(path), "interval": 3600}})
    old = manager([0])
    old.stat_loggers.append(NPUStatLogger(config, [0]))
    old.record(scheduler_stats, None, engine_idx=0)
    new = manager([0, 1])
    old.stat_loggers.clear()
    gc.collect()
    deadline = time.monotonic() + 60
    while not new.stat_loggers and time.monotonic() < deadline:
        time.sleep(0.05)
    (successor,) = new.stat_loggers
    new.record(scheduler_stats, None, engine_idx=1)
    new.stat_loggers.clear()
    successor.close()
    lines = [line for line in read_snapshots(path) if isinstance(line, Snapshot)]
    assert {engine for line in lines for engine in line.engines} == {0, 1}
    assert sum(line.counters["scheduler_steps"] for line in lines) == 2
