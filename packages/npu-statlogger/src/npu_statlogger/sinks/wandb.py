"""Weights & Biases, by its own client, offline: `wandb sync DIRECTORY` brings the run to a server later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import wandb

from npu_statlogger.sinks.base import Sink
from npu_statlogger.sinks.figures import flat, place
from npu_statlogger.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Line, Run

__all__ = ["Wandb", "open_sink"]


def open_sink(config: StatLoggerConfig, run: Run) -> Wandb:
    """Make the directory; the run begins with the first lines, since that takes seconds.

    Raises:
        OSError: the directory cannot be made.
    """
    assert config.wandb is not None
    config.wandb.mkdir(parents=True, exist_ok=True)
    return Wandb(config.wandb, run)


class Wandb(Sink):
    """Logs `engine_<index>/<figure>` at each interval; the settings are the run's configuration."""

    name: ClassVar[str] = "wandb"

    def __init__(self, directory: Path, run: Run) -> None:
        self._directory, self._line = directory, run
        self._run: Any = None

    def write(self, lines: Sequence[Line]) -> None:
        """Log interval lines.

        Raises:
            wandb.Error: the run could not begin.
        """
        if self._run is None:
            self._run = wandb.init(
                project="vllm",
                name=self._line.process,
                config={"model": self._line.model, **self._line.settings},
                dir=str(self._directory),
                mode="offline",
                # A server's output and signals are its own, and its machine is none of the run's business.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )  # fmt: skip
        for line in lines:
            if isinstance(line, Snapshot):
                self._run.log(
                    {f"{place(line)}/{name}": value for name, value in flat(line).items()} | {"time": line.end}
                )

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
