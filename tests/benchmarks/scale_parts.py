"""A scheduler and a worker that time themselves, which vLLM loads by name for :mod:`tests.benchmarks.scale_run`.

Each writes its seconds a step into the folder ``NPU_SCALE_FOLDER`` when it is asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from npu_platform.worker import NPUWorker


class Times:
    """Seconds of wall time and of this thread's processor time, by part, a list of steps each."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def begin(self) -> None:
        """Begin a step."""
        self.steps.append({"began": time.perf_counter(), "wall": 0.0, "cpu": 0.0})

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Add the time of a block to the step."""
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        if self.steps:
            self.steps[-1]["wall"] += time.perf_counter() - wall
            self.steps[-1]["cpu"] += time.thread_time() - cpu

    def write(self, name: str) -> None:
        """Write all steps into the folder."""
        (Path(os.environ["NPU_SCALE_FOLDER"]) / f"{name}.json").write_text(json.dumps(self.steps))


class TimedScheduler(Scheduler):
    """vLLM's scheduler, timed: what it decides, and what it does with the tokens that came."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = Times()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Decide on a step."""
        self.times.begin()
        with self.times.part():
            return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take its tokens."""
        with self.times.part():
            return super().update_from_output(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Write the times: a call that reaches the scheduler of every replica."""
        self.times.write(f"scheduler-{os.getpid()}")
        return super().reset_prefix_cache(*args, **kwargs)


class TimedWorker(NPUWorker):
    """The platform's worker, timed: all that a rank does for a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times = Times()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step."""
        self.times.begin()
        with self.times.part():
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample."""
        with self.times.part():
            return super().sample_tokens(*args, **kwargs)

    def write_times(self) -> None:
        """Write the times."""
        self.times.write(f"rank-{self.rank}-{os.getpid()}")
