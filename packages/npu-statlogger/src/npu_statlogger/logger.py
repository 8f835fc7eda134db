"""The class that vLLM loads through the entry point, and `attach`; no other module but compat.py imports vLLM."""

from __future__ import annotations

import threading
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from npu_statlogger.compat import managers_without_plugins
from npu_statlogger.config import SECTION, StatLoggerConfig
from npu_statlogger.errors import ConfigError
from npu_statlogger.metrics import labelled
from npu_statlogger.recorder import Recorder, logger

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

__all__ = ["NPUStatLogger", "attach"]


class NPUStatLogger(AggregateStatLoggerBase):
    """Gives the statistics of all engines of this process to the sinks; does nothing unless one is configured.

    An exception out of `record` would fail every request of the server (vLLM's output handler passes it on), so
    `record` only keeps references; reading and writing happen in threads of their own.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], config: StatLoggerConfig | None = None
    ) -> None:
        """Read the configuration and, if it names a sink, open it and start the threads.

        Raises:
            ConfigError: a setting is unknown or unusable.
            OSError: a file cannot be written.
        """
        config = config or StatLoggerConfig.read(vllm_config.additional_config)
        self._recorder: Recorder | None = None
        if not config.on:
            return
        model = str(getattr(vllm_config.model_config, "served_model_name", ""))
        self._recorder = Recorder(config, model, engine_indexes, _sizes(vllm_config))
        # vLLM never closes a logger: write the last line when it is collected, or else at exit. A forked process of
        # multiprocessing's, as an API server may be, ends without weakref.finalize and atexit.
        Finalize(self, self._recorder.close, exitpriority=10)
        weakref.finalize(self, _look_for_successor, vllm_config, list(engine_indexes)).atexit = False
        places = ", ".join(f"{name} ({place})" for name, place in config.places().items())
        logger.info("Statistics of engines %s go to %s every %s s.", engine_indexes, places, config.interval)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's records, which vLLM builds anew for every step."""
        if self._recorder is not None:
            self._recorder.put(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Count a change of the sleep state: asleep at `level`, or awake."""
        if self._recorder is not None:
            self._recorder.put_sleep(level if sleep else None)

    def record_admission_rejection(self, reason: str) -> None:
        """Count a request that the front end turned away."""
        if self._recorder is not None:
            self._recorder.put_event(labelled("admission_rejections", reason))

    def log_engine_initialized(self) -> None:
        """Do nothing; the line that `__init__` logs says it all."""

    def close(self) -> None:
        """Write what is left and end; records that come later are not kept."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()


def attach(llm: LLM, **settings: Any) -> NPUStatLogger:
    """Record an offline engine, for which vLLM loads no plugins; `close()` what is returned, or let the process end.

    Args:
        llm: made with `disable_log_stats=False`, since vLLM measures nothing otherwise.
        settings: those of additional_config["npu_statlogger"], such as `path="stats.jsonl"`; they win over it.

    Raises:
        ConfigError: the engine measures nothing, no sink is named, or a setting is unusable.
        OSError: a file cannot be written.
    """
    engine = llm.llm_engine
    if engine.logger_manager is None:
        msg = "npu_statlogger.attach: this LLM measures nothing; make it as LLM(..., disable_log_stats=False)."
        raise ConfigError(msg)
    section = {**_section(engine.vllm_config.additional_config), **settings}
    config = StatLoggerConfig.read({SECTION: section})
    if not config.on:
        msg = "npu_statlogger.attach: no place for the figures; name one, as in attach(llm, path='stats.jsonl')."
        raise ConfigError(msg)
    attached = NPUStatLogger(engine.vllm_config, engine.logger_manager.engine_indexes, config)
    engine.logger_manager.stat_loggers.append(attached)
    return attached


def _section(additional_config: object) -> dict[str, Any]:
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
    return section if isinstance(section, dict) else {}


def _sizes(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the settings of vLLM that a reader of the figures asks for first."""
    parts = {
        "model_config": ("max_model_len", "dtype", "quantization"),
        "cache_config": ("num_gpu_blocks", "block_size", "cache_dtype", "enable_prefix_caching"),
        "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
        "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    }
    sizes = {
        name: getattr(getattr(vllm_config, part, None), name, None) for part, names in parts.items() for name in names
    }
    return {name: value if isinstance(value, int | float) else str(value) for name, value in sizes.items() if value}


def _look_for_successor(vllm_config: VllmConfig, engines: list[int]) -> None:
    """Go on in the manager that elastic scaling made; in a thread, as garbage is collected wherever it falls due."""
    arguments = (vllm_config, engines)
    threading.Thread(target=_join_successor, args=arguments, name="npu-statlogger-join", daemon=True).start()


def _join_successor(vllm_config: VllmConfig, engines: list[int]) -> None:
    for manager in managers_without_plugins(engines):
        if not any(isinstance(each, NPUStatLogger) for each in manager.stat_loggers):
            try:
                manager.stat_loggers.append(NPUStatLogger(vllm_config, manager.engine_indexes))
            except (ConfigError, OSError):
                logger.exception("Statistics end here: vLLM has a new set of engines, and they could not be joined.")
