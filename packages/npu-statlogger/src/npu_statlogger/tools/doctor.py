"""`npu-stat doctor`: will this environment write statistics, and is what it writes in order."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.config import StatLoggerConfig
from npu_statlogger.errors import ConfigError, InputError
from npu_statlogger.lines import Line
from npu_statlogger.snapshot import SCHEMA, Snapshot
from npu_statlogger.tools.follow import Follower, time_of
from npu_statlogger.tools.text import duration, number
from npu_statlogger.versions import VLLM, version_of

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands

__all__ = ["Finding", "add", "examine"]

_VLLM_SERIES = ("0.32", "0.33")
_GROUP, _PLUGIN = "vllm.stat_logger_plugins", "npu_statlogger"
_LAST_LINES = 100
_DAYS_LEFT, _BYTES_LEFT = 3.0, 100 << 20
_LOST = ("records_dropped", "records_failed", "sink_lines_dropped")


@dataclass(frozen=True)
class Finding:
    """One thing looked at; what is not ok has a remedy."""

    subject: str
    ok: bool
    detail: str
    remedy: str = ""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="will this environment write statistics, and are they in order")
    text = "files to look at (default: the one that NPU_STATLOGGER_PATH names)"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def examine(files: list[Path], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is found, of this environment first, then of each file."""
    yield _package()
    yield _vllm()
    yield _entry_point()
    yield _plugins(environ)
    config, finding = _settings(environ)
    yield finding
    for file in files or ([config.path] if config is not None and config.path is not None else []):
        yield from _file(file)


def _run(options: argparse.Namespace) -> int:
    findings = list(examine(options.files, os.environ))
    healthy = all(finding.ok for finding in findings)
    if options.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.ok else 'PROBLEM'}  {finding.subject}: {finding.detail}")
            if finding.remedy:
                print(f"         {finding.remedy}")
    return 0 if healthy else 3


def _package() -> Finding:
    return Finding("npu-statlogger", True, f"{metadata.version('npu-statlogger')}, writes {SCHEMA}")


def _vllm() -> Finding:
    found = version_of(*VLLM)
    if found is None:
        detail = "not installed here: npu-stat reads files, and nothing here writes any"
        return Finding("vLLM", True, detail)
    if ".".join(found.split(".")[:2]) not in _VLLM_SERIES:
        wanted = " or ".join(_VLLM_SERIES)
        return Finding("vLLM", False, f"{found}; this package is made for {wanted}", f"install vLLM {wanted}.")
    return Finding("vLLM", True, found)


def _entry_point() -> Finding:
    points = metadata.entry_points(group=_GROUP)
    others = ", ".join(sorted(point.name for point in points if point.name != _PLUGIN))
    if _PLUGIN not in points.names:
        remedy = "install npu-statlogger again: the metadata of this installation is not that of the package."
        return Finding("entry point", False, f"none of the name {_PLUGIN} in {_GROUP}", remedy)
    return Finding("entry point", True, f"{_PLUGIN} in {_GROUP}" + (f", beside {others}" if others else ""))


def _plugins(environ: Mapping[str, str]) -> Finding:
    chosen = environ.get("VLLM_PLUGINS")
    if chosen is None:
        return Finding("VLLM_PLUGINS", True, "not set: vLLM loads all plugins")
    if _PLUGIN not in chosen.split(","):
        remedy = f"set VLLM_PLUGINS={','.join(filter(None, [chosen, _PLUGIN]))}, or unset it."
        return Finding("VLLM_PLUGINS", False, f"{chosen!r} leaves {_PLUGIN} out, so vLLM does not load it", remedy)
    return Finding("VLLM_PLUGINS", True, f"names {_PLUGIN}")


def _settings(environ: Mapping[str, str]) -> tuple[StatLoggerConfig | None, Finding]:
    try:
        config = StatLoggerConfig.read({}, environ)
    except ConfigError as error:
        return None, Finding("settings", False, str(error), "mend the variable that is named.")
    if not config.on:
        detail = "no NPU_STATLOGGER_PATH here: the logger is off, unless --additional-config names a place"
        return config, Finding("settings", True, detail)
    places = ", ".join(f"{name} ({place})" for name, place in config.places().items())
    return config, Finding("settings", True, f"figures of each {duration(config.interval)} go to {places}")


def _file(file: Path) -> Iterator[Finding]:
    subject, folder = str(file), file.parent
    if not folder.is_dir():
        yield Finding(subject, False, f"the folder {folder} is not there", f"make it: mkdir -p {folder}")
        return
    if not file.exists():
        if os.access(folder, os.W_OK | os.X_OK):
            yield Finding(subject, True, "not there yet; it can be made")
        else:
            yield Finding(subject, False, f"not there, and {folder} cannot be written", "name another folder.")
        yield _disk(file, None)
        return
    try:
        follower = Follower(file)
    except InputError as error:
        yield Finding(subject, False, str(error), "name another file.")
        return
    if not (follower.packed or os.access(file, os.W_OK)):
        yield Finding(subject, False, "cannot be written by this user", f"mend its mode: chmod u+w {file}")
    yield from _lines(subject, file, follower)


def _lines(subject: str, file: Path, follower: Follower) -> Iterator[Finding]:
    follower.back(_LAST_LINES)
    lines = list(follower.poll())
    follower.close()
    if not lines and file.stat().st_size:
        remedy = "name a new file: the logger refuses one that holds something else."
        yield Finding(subject, False, "holds no line of npu-statlogger", remedy)
        return
    if follower.damaged:
        remedy = "the other lines count; find the damaged ones with `npu-stat summary`."
        yield Finding(subject, False, f"{follower.damaged} of the last {_LAST_LINES} lines are damaged", remedy)
    else:
        yield Finding(subject, True, f"readable, {number(file.stat().st_size)} bytes")
    if lines:
        yield _writer(subject, lines)
        yield from _lost(subject, lines)
    yield _disk(file, None if follower.packed else _bytes_a_day(file, lines))


def _writer(subject: str, lines: list[Line]) -> Finding:
    """Tell whether who wrote the last line lives: an idle server writes none, so that age alone says nothing."""
    last = max(lines, key=time_of)
    processes = sorted(last.processes) if isinstance(last, Snapshot) else [last.process]
    ages = f"last line {duration(max(time.time() - time_of(last), 0.0))} ago by {', '.join(processes)}"
    here = [process.rpartition(":") for process in processes if process.startswith(f"{socket.gethostname()}:")]
    if not here:
        return Finding(subject, True, f"{ages}, not of this machine")
    lives = any(Path(f"/proc/{pid}").exists() for _, _, pid in here)
    return Finding(subject, True, f"{ages}, which {'runs' if lives else 'has ended'}")


def _lost(subject: str, lines: list[Line]) -> Iterator[Finding]:
    for name in _LOST:
        snapshots = [line for line in lines if isinstance(line, Snapshot)]
        count = sum(value for line in snapshots for key, value in line.counters.items() if key.split(".")[0] == name)
        if count:
            remedy = "the log of the server says why (`npu_statlogger`)."
            yield Finding(subject, False, f"{number(count)} {name.replace('_', ' ')} in the last lines", remedy)


def _bytes_a_day(file: Path, lines: list[Line]) -> float | None:
    times = [time_of(line) for line in lines]
    span = max(times, default=0.0) - min(times, default=0.0)
    if len(lines) < 2 or span <= 0:
        return None
    lines_a_day = 86400 * (len(lines) - 1) / span
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - (1 << 20)))
        recent = opened.read()
    return lines_a_day * len(recent) / max(1, recent.count(b"\n"))


def _disk(file: Path, bytes_a_day: float | None) -> Finding:
    free = shutil.disk_usage(file.parent).free
    days = free / bytes_a_day if bytes_a_day else None
    growth = "" if days is None else f", enough for {number(min(days, 9999))} days of lines as the last ones"
    detail = f"{number(free)} bytes are free{growth}"
    if free < _BYTES_LEFT or (days is not None and days < _DAYS_LEFT):
        return Finding(f"disk of {file}", False, detail, "free some, or write elsewhere or less often.")
    return Finding(f"disk of {file}", True, detail)
