"""What the user may set: one dataclass, read once from vLLM's additional_config and the environment."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SECTION", "StatLoggerConfig"]

SECTION = "npu_statlogger"
"""Key of our section in `--additional-config`."""

ENV_PREFIX = "NPU_STATLOGGER_"


@dataclass(frozen=True)
class StatLoggerConfig:
    """Where the lines go and how often; without a path the logger is off."""

    path: Path | None = None
    """File that lines are appended to (NPU_STATLOGGER_PATH). Several processes may share it."""

    interval: float = 10.0
    """Seconds of traffic that one line covers (NPU_STATLOGGER_INTERVAL)."""

    @classmethod
    def read(cls, additional_config: object, environ: Mapping[str, str] = os.environ) -> StatLoggerConfig:
        """Merge both sources; additional_config wins over the environment.

        Raises:
            ConfigError: an unknown key, a value of the wrong kind, or an interval without a path.
        """
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
        if not isinstance(section, dict):
            msg = (
                f"additional_config[{SECTION!r}] must be an object such as {{'path': 'stats.jsonl'}}; got {section!r}."
            )
            raise ConfigError(msg)
        settings = {**_from_environment(environ), **{_known(key, ""): value for key, value in section.items()}}
        if settings and "path" not in settings:
            msg = f"{SECTION}: interval is set but path is not, so nothing would be written; set {ENV_PREFIX}PATH too."
            raise ConfigError(msg)
        if not settings:
            return cls()
        return cls(_path(settings["path"]), _interval(settings.get("interval", cls.interval)))


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX) and value}
    return {_known(name.removeprefix(ENV_PREFIX).lower(), ENV_PREFIX): value for name, value in found.items()}


def _known(key: str, prefix: str) -> str:
    """Return `key` if it is a setting, else raise with the nearest one."""
    names = [field.name for field in fields(StatLoggerConfig)]
    if key in names:
        return key
    shown = [prefix + (name.upper() if prefix else name) for name in names]
    given = prefix + (key.upper() if prefix else str(key))
    nearest = difflib.get_close_matches(given, shown, n=1, cutoff=0)[0]
    msg = f"{SECTION}: unknown setting {given!r}; did you mean {nearest!r}? Settings are {', '.join(shown)}."
    raise ConfigError(msg)


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value:
        msg = f"{SECTION}: path must be the name of a file; got {value!r}."
        raise ConfigError(msg)
    return Path(value).expanduser()


def _interval(value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type] # anything else is the except branch
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not (math.isfinite(seconds) and seconds > 0):
        msg = f"{SECTION}: interval must be a number of seconds above 0; got {value!r}."
        raise ConfigError(msg)
    return seconds
