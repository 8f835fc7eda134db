"""The class that vLLM loads through the entry point; it imports vLLM, the rest of the package does not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.metrics import labelled
from npu_statlogger.recorder import Recorder, logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

__all__ = ["NPUStatLogger"]


class NPUStatLogger(AggregateStatLoggerBase):
    """Writes the statistics of all engines of this process as JSON lines; does nothing unless a path is configured.

    An exception out of `record` would fail every request of the server (vLLM's output handler passes it on), so
    `record` only keeps references; reading and writing happen in a thread of their own.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        """Read the configuration and, if it names a path, open the file and start the thread.

        Raises:
            ConfigError: a setting is unknown or unusable.
            OSError: the file cannot be written.
        """
        config = StatLoggerConfig.read(vllm_config.additional_config)
        self._recorder: Recorder | None = None
        if config.path is None:
            return
        model = str(getattr(vllm_config.model_config, "served_model_name", ""))
        self._recorder = Recorder(config, model, engine_indexes)
        # vLLM never closes a logger: write the last line when it is collected, or else at exit.
        self._finalizer = weakref.finalize(self, self._recorder.close)
        logger.info("Statistics of engines %s go to %s every %s s.", engine_indexes, config.path, config.interval)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's records; vLLM builds them anew for every step, so references are enough."""
        if self._recorder is not None:
            self._recorder.put(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Count a change of the sleep state: asleep at `level`, or awake."""
        if self._recorder is not None:
            self._recorder.put_event(labelled("sleep_events", f"level_{level}" if sleep else "awake"))

    def record_admission_rejection(self, reason: str) -> None:
        """Count a request that the front end turned away."""
        if self._recorder is not None:
            self._recorder.put_event(labelled("admission_rejections", reason))

    def log_engine_initialized(self) -> None:
        """Do nothing; the line that `__init__` logs says it all."""
