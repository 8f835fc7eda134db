"""What the user may set: one dataclass, read once from vLLM's additional_config and the environment."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SECTION", "SINKS", "StatLoggerConfig", "host_and_port"]

SECTION = "npu_statlogger"
"""Key of our section in `--additional-config`."""

ENV_PREFIX = "NPU_STATLOGGER_"
SINKS = ("path", "csv", "sqlite", "parquet", "prometheus", "push", "otlp", "tensorboard", "wandb", "statsd")
"""Settings that name a place for the figures; without any of them the logger is off."""

_FILES = ("path", "csv", "sqlite")
"""Those of them that name a file, which no other sink may write to."""


@dataclass(frozen=True)
class StatLoggerConfig:
    """Where the figures go and how often; without a sink the logger is off. NPU_STATLOGGER_<NAME> sets a field, too."""

    path: Path | None = None
    """File that lines are appended to. Several processes may share it."""

    interval: float = 10.0
    """Seconds of traffic that one line covers."""

    requests: float = 0.0
    """Fraction of the finished requests that have a line of their own."""

    slow_seconds: float = 0.0
    """Requests that took at least this long, end to end, have a line in any case; 0: these are sampled like others."""

    request_ids: str = "hash"
    """How those lines name a request: "hash" (of its id), "plain" (the id) or "none"."""

    steps: float = 0.0
    """Fraction of the engines' steps that have a line of their own."""

    rotate_mib: float = 0.0
    """Size in MiB above which the file at `path` is set aside and a new one begun; 0: never."""

    rotate_hours: float = 0.0
    """Age in hours at which it is, by UTC: 24 is at midnight; 0: never."""

    keep: int = 0
    """Number of files set aside that are kept; 0: all."""

    compress: bool = True
    """Whether files set aside are compressed with gzip."""

    csv: Path | None = None
    """File that the figures of each interval are appended to as rows of comma-separated values."""

    sqlite: Path | None = None
    """SQLite database that lines are inserted into."""

    parquet: Path | None = None
    """Directory that Parquet files are written to."""

    prometheus: str = ""
    """"vllm": beside vLLM's own metrics, or HOST:PORT to serve them at."""

    push: str = ""
    """URL of a Prometheus push gateway."""

    otlp: str = ""
    """URL of an OpenTelemetry collector's OTLP/HTTP receiver."""

    tensorboard: Path | None = None
    """Directory that TensorBoard's event files are written to."""

    wandb: Path | None = None
    """Directory that an offline run of Weights & Biases is written to."""

    statsd: str = ""
    """HOST:PORT of a StatsD server (UDP)."""

    @property
    def on(self) -> bool:
        """Whether any sink is set."""
        return any(getattr(self, name) for name in SINKS)

    def places(self) -> dict[str, str]:
        """Return the sinks that are set and their places; a password in a URL is left out."""
        named = {name: str(getattr(self, name)) for name in SINKS if getattr(self, name)}
        return {name: re.sub("//[^/]*@", "//", place) for name, place in named.items()}

    @classmethod
    def read(cls, additional_config: object, environ: Mapping[str, str] = os.environ) -> StatLoggerConfig:
        """Merge both sources; additional_config wins over the environment.

        Raises:
            ConfigError: an unknown key, a value of the wrong kind, settings without a sink, or two sinks of one file.
        """
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
        if not isinstance(section, dict):
            msg = (
                f"additional_config[{SECTION!r}] must be an object such as {{'path': 'stats.jsonl'}}; got {section!r}."
            )
            raise ConfigError(msg)
        given = {**_from_environment(environ), **{_known(key, ""): value for key, value in section.items()}}
        config = cls(**{key: _PARSERS[key](key, value) for key, value in given.items()})
        if given and not config.on:
            msg = (
                f"{SECTION}: {next(iter(given))} is set but path is not, nor any other place, so nothing would be "
                f"written; set {ENV_PREFIX}PATH too."
            )
            raise ConfigError(msg)
        _refuse_one_file_for_two(config)
        return config


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT; an address of IPv6 stands in brackets there, as in a URL."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _refuse_one_file_for_two(config: StatLoggerConfig) -> None:
    named: dict[str, str] = {}
    for setting in _FILES:
        path = getattr(config, setting)
        other = named.setdefault(os.path.realpath(path), setting) if path else setting
        if other != setting:
            msg = (
                f"{SECTION}: {other} and {setting} name one file, {path}, whose lines would mix; name another for one."
            )
            raise ConfigError(msg)


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


def _path(key: str, value: object) -> Path:
    if not isinstance(value, str) or not value:
        msg = f"{SECTION}: {key} must be the name of a file or directory; got {value!r}."
        raise ConfigError(msg)
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        msg = f"{SECTION}: {key} is {value!r}, a home directory that is not known; write the path in full."
        raise ConfigError(msg) from error


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        msg = f"{SECTION}: {key} must be a non-empty text; got {value!r}."
        raise ConfigError(msg)
    return value


def _address(key: str, value: object) -> str:
    host, _, port = _text(key, value).rpartition(":")
    beside_vllm = key == "prometheus"
    if not (beside_vllm and value == "vllm") and not (host and port.isdecimal() and int(port) < 1 << 16):
        msg = f"{SECTION}: {key} must be HOST:PORT{', or vllm' if beside_vllm else ''}; got {value!r}."
        raise ConfigError(msg)
    return str(value)


def _url(key: str, value: object) -> str:
    if not _text(key, value).startswith(("http://", "https://")):
        msg = f"{SECTION}: {key} must be a URL that begins with http:// or https://; got {value!r}."
        raise ConfigError(msg)
    return str(value)


def _number(key: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type] # anything else is the except branch
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number >= 0):
        msg = f"{SECTION}: {key} must be a number, not below 0; got {value!r}."
        raise ConfigError(msg)
    return number


def _interval(key: str, value: object) -> float:
    try:
        seconds = _number(key, value)
    except ConfigError:
        seconds = 0
    if not seconds > 0:
        msg = f"{SECTION}: {key} must be a number of seconds above 0; got {value!r}."
        raise ConfigError(msg)
    return seconds


def _fraction(key: str, value: object) -> float:
    fraction = _number(key, value)
    if fraction > 1:
        msg = f"{SECTION}: {key} must be a fraction from 0 to 1; got {value!r}."
        raise ConfigError(msg)
    return fraction


def _count(key: str, value: object) -> int:
    number = _number(key, value)
    if number != int(number):
        msg = f"{SECTION}: {key} must be a whole number; got {value!r}."
        raise ConfigError(msg)
    return int(number)


def _flag(key: str, value: object) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False}
    if str(value).lower() not in known:
        msg = f"{SECTION}: {key} must be true or false (1 or 0); got {value!r}."
        raise ConfigError(msg)
    return known[str(value).lower()]


def _request_ids(key: str, value: object) -> str:
    if value not in ("hash", "plain", "none"):
        msg = f"{SECTION}: {key} must be hash, plain or none; got {value!r}."
        raise ConfigError(msg)
    return str(value)


_PARSERS: dict[str, Callable[[str, object], Any]] = {
    "interval": _interval,
    "requests": _fraction,
    "slow_seconds": _number,
    "request_ids": _request_ids,
    "steps": _fraction,
    "rotate_mib": _number,
    "rotate_hours": _number,
    "keep": _count,
    "compress": _flag,
    "prometheus": _address,
    "statsd": _address,
    **dict.fromkeys(("push", "otlp"), _url),
    **dict.fromkeys(("path", "csv", "sqlite", "parquet", "tensorboard", "wandb"), _path),
}
