"""`npu-stat tail`: the last lines of files, a row each, and with -f those that come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from npu_statlogger.lines import Line, Note, RequestLine, Run, StepLine
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.arguments import count, seconds
from npu_statlogger.tools.follow import Follower, time_of
from npu_statlogger.tools.source import no_lines
from npu_statlogger.tools.text import clock, duration, figure, number

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands

__all__ = ["add", "row"]

_KINDS = ("interval", "request", "step", "run", "note")
_POLL = 0.2

_COLUMNS = (
    ("UTC", 8),
    ("engine", 6),
    ("run", 5),
    ("wait", 5),
    ("KV", 7),
    ("gen", 8),
    ("prompt", 8),
    ("first p50", 9),
    ("p99", 8),
    ("token p50", 9),
    ("p99", 8),
    ("hits", 7),
    ("done", 5),
)


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("tail", help="the last lines, a row each; with -f also those that come")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that npu-statlogger writes")
    parser.add_argument("-n", type=count, default=10, metavar="LINES", help="lines of each file to begin with (10)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with the lines that come, also over rotation"
    )
    text = "only lines of this kind, may be repeated (default: interval, run and note)"
    parser.add_argument("--kind", action="append", choices=_KINDS, help=text)
    parser.add_argument("--for", dest="limit", type=seconds, metavar="TIME", help="with -f: end after this time")
    parser.add_argument("--json", action="store_true", help="print the lines as they are")
    parser.set_defaults(run=_run)


def row(line: Line) -> str:
    """Return a line as one row of text."""
    match line:
        case Snapshot():
            return "  ".join(cell.rjust(width) for cell, (_, width) in zip(_cells(line), _COLUMNS, strict=True))
        case RequestLine():
            return (
                f"{clock(line.time, day=False)}  request {line.request_id or '-'} {line.finish_reason}: "
                f"{line.prompt_tokens} tokens ({line.cached_tokens} cached) to {line.generation_tokens}, "
                f"queue {duration(line.queue_seconds)}, first {duration(line.first_token_seconds)}, "
                f"per token {duration(line.time_per_output_token_seconds)}, in all {duration(line.e2e_seconds)}"
            )
        case StepLine():
            return (
                f"{clock(line.time, day=False)}  step of engine {line.engine}: {duration(line.seconds)}, "
                f"{line.running} run, {line.waiting} wait, KV {figure('_perc', line.kv_cache_usage)}, "
                f"{line.prompt_tokens} prompt tokens, {line.generation_tokens} generated"
            )
        case Run():
            versions = ", ".join(f"{name} {version}" for name, version in sorted(line.versions.items()))
            return f"{clock(line.time, day=False)}  {line.process} writes: {line.model}, {versions}"
        case Note():
            return f"{clock(line.time, day=False)}  note: {line.text}"


def _run(options: argparse.Namespace) -> int:
    kinds = set(options.kind or ("interval", "run", "note"))
    followers = [Follower(path) for path in options.files]
    if options.n and not options.follow and not any(follower.has_lines() for follower in followers):
        raise no_lines(options.files)
    for follower in followers:
        follower.back(options.n, lambda line: _kind(line) in kinds)
    if "interval" in kinds and not options.json:
        print("  ".join(head.rjust(width) for head, width in _COLUMNS))
    end = time.monotonic() + options.limit if options.limit is not None else None
    while True:
        lines = [line for follower in followers for line in follower.poll()] if followers[1:] else followers[0].poll()
        for line in sorted(lines, key=time_of) if followers[1:] else lines:
            if _kind(line) in kinds:
                print(json.dumps(line.to_dict()) if options.json else row(line))
        sys.stdout.flush()
        if not options.follow or (end is not None and time.monotonic() >= end):
            break
        time.sleep(_POLL)
    damaged = sum(follower.damaged for follower in followers)
    if damaged:
        print(f"npu-stat: {damaged} lines left out: damaged.", file=sys.stderr)
    return 0


def _kind(line: Line) -> str:
    return getattr(line, "kind", "interval")


def _cells(line: Snapshot) -> tuple[str, ...]:
    rates, spread = line.rates(), line.distributions
    return (
        clock(line.end, day=False),
        ",".join(map(str, sorted(line.engines))) or "-",
        *(figure(name, spread[name].mean) for name in names.LOAD),
        figure("_per_second", rates["generation_tokens_per_second"]),
        figure("_per_second", rates["prompt_tokens_computed_per_second"]),
        *(figure(name, spread[name].quantile(q)) for name in (names.TTFT, names.ITL) for q in (0.5, 0.99)),
        figure("_rate", rates["prefix_cache_hit_rate"]),
        number(names.finished(line.counters)),
    )
