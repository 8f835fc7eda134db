"""Where figures go: one module for each kind of place, behind one interface (base.Sink).

A sink has a thread and a mailbox of its own (courier.Courier), so that one that stalls or fails touches neither the
server nor the other sinks. Libraries that only one sink needs are imported by that sink, and are extras.
"""

from __future__ import annotations

import errno
import importlib
from typing import TYPE_CHECKING

from npu_statlogger.config import SINKS
from npu_statlogger.errors import ConfigError

if TYPE_CHECKING:
    from npu_statlogger.config import StatLoggerConfig
    from npu_statlogger.lines import Run
    from npu_statlogger.sinks.base import Sink

__all__ = ["open_sinks"]

_MODULES = {"path": "jsonl"}
_REMEDIES = {
    errno.ENOENT: "make the folder that it is to be in, or name another place",
    errno.ENOTDIR: "a file stands where a folder should; name another place",
    errno.EEXIST: "a file stands where a folder should; name another place",
    errno.EISDIR: "it is a folder; name a file",
}


def open_sinks(config: StatLoggerConfig, run: Run) -> list[Sink]:
    """Open the sinks that the settings name.

    Raises:
        ConfigError: a sink's library is missing, or what it is to write to belongs to somebody else.
        OSError: a file or address cannot be used.
    """
    sinks: list[Sink] = []
    try:
        # One by one, so that those before one that fails are closed.
        for setting in (each for each in SINKS if getattr(config, each)):
            sinks.append(_open(setting, config, run))  # noqa: PERF401
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _open(setting: str, config: StatLoggerConfig, run: Run) -> Sink:
    try:
        module = importlib.import_module(f"npu_statlogger.sinks.{_MODULES.get(setting, setting)}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("npu_statlogger"):
            raise
        remedy = f"pip install 'npu-statlogger[{setting}]', or leave {setting} out"
        msg = f"npu_statlogger: {setting} needs the module {error.name}, which is not installed: {remedy}."
        raise ConfigError(msg) from error
    try:
        sink: Sink = module.open_sink(config, run)
    except OSError as error:
        if error.errno is None:  # a sentence of the sink's own
            raise
        remedy = _REMEDIES.get(error.errno, "mend its permissions, or name another place")
        place = f"{setting}={config.places()[setting]}"
        msg = f"npu_statlogger: {place} cannot be written ({error.strerror}): {remedy}."
        raise type(error)(msg) from error
    return sink
