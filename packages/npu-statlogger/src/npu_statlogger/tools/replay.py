"""`npu-stat replay`: a recorded load sent again to a server, at the recorded times and with the recorded lengths.

Prompts are not recorded, so each is made of random tokens; as many as were cached then are taken from one sequence that
all prompts share, so that a prefix cache finds about as much as it did. Requests are sent when they are due, however
many are still open. Memory holds the requests that are open and those of one hour of arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_statlogger.errors import InputError
from npu_statlogger.jsonl import LineWriter, encode
from npu_statlogger.sketch import Sketch
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.arguments import count, refuse_without
from npu_statlogger.tools.client import ERROR, ClientSpans
from npu_statlogger.tools.request import Request
from npu_statlogger.tools.sending import Server
from npu_statlogger.tools.source import Reading, open_error
from npu_statlogger.tools.text import duration, figure, number, table

if TYPE_CHECKING:
    from npu_statlogger.tools.arguments import Commands

__all__ = ["Prompts", "add", "by_arrival", "replay"]

_LONGEST = 3600.0
"""Lines are in the order of finishing: a request that took longer than this is sent late."""

_LATEST = 2.0
"""Seconds after its end in which a span is surely complete."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("replay", help="send a recorded load again (needs aiohttp)")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files with a line for each request")
    parser.add_argument("--url", required=True, help="the server, such as http://localhost:8000")
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--speed", type=_positive, default=1.0, help="2: twice as fast as recorded")
    parser.add_argument("--limit", type=count, metavar="COUNT", help="send the first COUNT requests")
    parser.add_argument("--vocabulary", type=int, default=500, metavar="SIZE", help="tokens are below this (500)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (0)")
    text = "append what the client saw, as lines for `npu-stat report` and `diff`"
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def by_arrival(requests: Iterator[Request]) -> Iterator[Request]:
    """Yield requests in the order of arrival, given in that of finishing."""
    waiting: list[tuple[float, int, Request]] = []
    for index, request in enumerate(requests):
        heapq.heappush(waiting, (request.arrival, index, request))
        while waiting and waiting[0][0] < request.end - _LONGEST:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


class Prompts:
    """Prompts of random tokens."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self._shared: list[int] = []

    def of(self, request: Request) -> list[int]:
        """Return token ids, as many as the request had, the first of them shared as far as they were cached."""
        cached = min(request.cached_tokens, request.prompt_tokens)
        if len(self._shared) < cached:
            self._shared += self._draw(cached - len(self._shared))
        return self._shared[:cached] + self._draw(request.prompt_tokens - cached)

    def _draw(self, count: int) -> list[int]:
        return self._random.integers(0, self._vocabulary, count).tolist()


@dataclass
class Outcome:
    """What a replay found."""

    start: float
    recorded: Snapshot = field(default_factory=Snapshot)
    replayed: Snapshot = field(default_factory=Snapshot)
    late: Sketch = field(default_factory=Sketch)
    """How long after it was due each request was sent, in seconds: more than a little means a slow client."""

    sent: int = 0
    first_error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "sent": self.sent,
            "failed": self.replayed.counters[f"{names.FINISHED}{ERROR}"],
            "first_error": self.first_error,
            "late_seconds": {"p50": self.late.quantile(0.5), "p99": self.late.quantile(0.99)},
            "recorded": self.recorded.to_dict(),
            "replayed": self.replayed.to_dict(),
        }


async def replay(
    requests: Iterator[Request], server: Server, prompts: Prompts, speed: float, writer: LineWriter | None
) -> Outcome:
    """Send the requests when they are due and wait for all; lines go to `writer` while it runs.

    Raises:
        InputError: a line cannot be written.
    """
    outcome, spans, recorded = Outcome(time.time()), _spans(server.model), _spans(server.model)

    async def one(request: Request) -> None:
        answer = await server.send(prompts.of(request), max(1, request.generation_tokens))
        spans.add(answer.request, answer.gaps)
        outcome.first_error = outcome.first_error or answer.error
        _flush(spans, outcome, writer, time.time() - _LATEST)

    first: float | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                first = request.arrival if first is None else first
                due = outcome.start + (request.arrival - first) / speed
                await asyncio.sleep(max(due - time.time(), 0.0))
                outcome.late.add([max(time.time() - due, 0.0)])
                outcome.sent += 1
                recorded.add(request, ())
                _merge(outcome.recorded, recorded.take(request.arrival))
                group.create_task(one(request))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    _flush(spans, outcome, writer, math.inf)
    _merge(outcome.recorded, recorded.take(math.inf))
    return outcome


def _merge(whole: Snapshot, snapshots: Iterable[Snapshot]) -> None:
    for snapshot in snapshots:
        whole.merge(snapshot)


def _flush(spans: ClientSpans, outcome: Outcome, writer: LineWriter | None, until: float) -> None:
    """Take the spans that are over into the outcome and the file."""
    for snapshot in spans.take(until):
        outcome.replayed.merge(snapshot)
        if writer is not None:
            try:
                writer.append(encode(snapshot))
            except OSError as error:
                msg = f"cannot write what the client saw: {error.strerror}."
                raise InputError(msg) from error


def _run(options: argparse.Namespace) -> int:
    try:
        import aiohttp
    except ImportError as error:
        refuse_without("aiohttp", "replay", error)
    reading = Reading(options.files)
    requests = itertools.islice(by_arrival(_whole(reading.requests())), options.limit)
    first = next(requests, None)
    if first is None:
        msg = "the files hold no request lines; record them with NPU_STATLOGGER_REQUESTS=1."
        raise InputError(msg)

    async def session() -> Outcome:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            server = await Server.find(http, options.url, options.model)
            writer = LineWriter(options.output) if options.output else None
            prompts = Prompts(options.vocabulary, options.seed)
            return await replay(itertools.chain([first], requests), server, prompts, options.speed, writer)

    try:
        outcome = asyncio.run(session())
    except OSError as error:
        raise open_error(error) from error
    print(json.dumps(outcome.to_dict()) if options.json else "\n".join(_render(outcome)))
    return 3 if outcome.replayed.counters[f"{names.FINISHED}{ERROR}"] else 0


def _whole(requests: Iterator[Request]) -> Iterator[Request]:
    """Say once if the file holds a sample alone: then the load is thinner than it was."""
    said = False
    for request in requests:
        if request.weight > 1 and not said:
            said = True
            text = f"npu-stat: one of {request.weight:g} requests was recorded, so the load is thinner than it was."
            print(text, file=sys.stderr)
        if request.reason != ERROR and request.prompt_tokens:
            yield request


def _render(outcome: Outcome) -> Iterator[str]:
    failed = outcome.replayed.counters[f"{names.FINISHED}{ERROR}"]
    late = duration(outcome.late.quantile(0.99))
    yield f"{number(outcome.sent)} requests sent, {number(failed)} failed; sent late by up to {late} (p99)"
    if outcome.first_error:
        yield f"first error: {outcome.first_error}"
    rows = []
    for name in (names.TTFT, names.ITL, names.TPOT, names.E2E):
        for label, q in {"p50": 0.5, "p99": 0.99}.items():
            values = [side.distributions[name].quantile(q) for side in (outcome.recorded, outcome.replayed)]
            rows.append((f"{names.label(name)}, {label}", *(figure(name, value) for value in values)))
    yield from table(("", "recorded", "replayed"), rows)
    yield "Recorded times are the server's, replayed ones the client's: the way between them is in the latter."


def _spans(model: str) -> ClientSpans:
    return ClientSpans(0.0, 1.0, f"{socket.gethostname()}:{os.getpid()}", model)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        msg = f"{text!r} is no number above 0"
        raise argparse.ArgumentTypeError(msg)
    return value
