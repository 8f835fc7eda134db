"""`npu-stat slo`: which part of the requests met the targets, the goodput, and what is left of the error budget.

Where each request has a line the answer is exact. From distributions alone one knows for each target how many requests
missed it, not which: then the part that met all of them lies between two bounds, and both are shown. A request may miss
a target in one line and finish in a later one, so that misses are compared with requests over a whole time only.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_statlogger.errors import InputError
from npu_statlogger.lines import RequestLine
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.arguments import add_files, seconds, share
from npu_statlogger.tools.buckets import share_within
from npu_statlogger.tools.request import Request
from npu_statlogger.tools.source import Reading
from npu_statlogger.tools.text import duration, number, table
from npu_statlogger.tools.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npu_statlogger.tools.arguments import Commands

__all__ = ["Account", "add"]

_TARGETS = {"ttft": names.TTFT, "tpot": names.TPOT, "e2e": names.E2E}
_WINDOWS = {"5 min": 300.0, "1 h": 3600.0, "6 h": 21600.0, "3 d": 259200.0}
_SPANS = 1440
_OTHERS = "failed or refused"
_COVERED = 0.9
"""Part of the requests that must have a line for the lines to be taken for all."""


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("slo", help="part of the requests within targets, goodput, error budget")
    add_files(parser)
    for target, name in _TARGETS.items():
        parser.add_argument(
            f"--{target}", type=seconds, metavar="TIME", help=f"target: {names.label(name)}, such as 2s"
        )
    text = "part of the requests that shall meet all targets (default 99%%)"
    parser.add_argument("--objective", type=share, default=0.99, metavar="SHARE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


@dataclass
class Account:
    """Requests in all, and what is known of those that missed a target."""

    targets: dict[str, float]
    objective: float
    timeline: Timeline = field(default_factory=lambda: Timeline(_SPANS))
    total: Counter[str] = field(default_factory=Counter)
    """all: requests. finished: those of them that distributions tell of; low.<target> and high.<target>: their misses,
    at least and at most. bad: those of the others that missed any target; missed.<target>: this one."""

    def add_line(self, line: Snapshot) -> None:
        """Count finished requests from distributions; one that failed has missed."""
        failed, every = line.counters[f"{names.FINISHED}error"], names.finished(line.counters)
        counts: dict[str, float] = {
            "all": every,
            "finished": every,
            f"low.{_OTHERS}": failed,
            f"high.{_OTHERS}": failed,
        }
        for target, limit in self.targets.items():
            sketch = line.distributions.get(_TARGETS[target])
            if sketch is not None and sketch.count:
                low, high = share_within(sketch, limit)
                counts |= {f"low.{target}": sketch.count * (1 - high), f"high.{target}": sketch.count * (1 - low)}
        self._add(line.start, line.end, counts)

    def add_refused(self, line: Snapshot) -> None:
        """Count requests that were refused; they have no line of their own."""
        count = sum(count for name, count in line.counters.items() if name.startswith(names.REJECTED))
        if count:
            self._add(line.start, line.end, {"all": count, "bad": count, f"missed.{_OTHERS}": count})

    def add_request(self, request: Request) -> None:
        """Count one request."""
        values = {"ttft": request.ttft, "tpot": request.tpot, "e2e": request.e2e}
        late = {target for target, limit in self.targets.items() if (values[target] or 0.0) > limit}
        missed = late | ({_OTHERS} if request.reason == "error" else set())
        counts = {"all": request.weight, "bad": request.weight if missed else 0.0}
        self._add(request.end, request.end, counts | {f"missed.{name}": request.weight for name in missed})

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data; of two bounds the first is the worse."""
        every, bad = self.total["all"], self._bad(self.total)
        length = max(self.timeline.end - self.timeline.start, 0.0)
        met = [1 - bound / every for bound in bad]
        budget = every * (1 - self.objective)
        return {
            "targets_seconds": self.targets,
            "objective": self.objective,
            "requests": every,
            "seconds": length,
            "met": met,
            "holds": True if met[0] >= self.objective else (False if met[1] < self.objective else None),
            "goodput_per_second": [part * every / length if length else None for part in met],
            "missed": {name: self.total[f"missed.{name}"] + self.total[f"high.{name}"] for name in self._names()},
            "budget_requests": budget,
            "budget_spent": [bound / budget for bound in bad],
            "burn_rates": {name: self._burn(window) for name, window in _WINDOWS.items() if window < length},
        }

    def _names(self) -> tuple[str, ...]:
        return (*self.targets, _OTHERS)

    def _add(self, start: float, end: float, counts: Mapping[str, float]) -> None:
        self.total.update(counts)
        self.timeline.add(Snapshot(start, end, counters=Counter(counts)))

    def _bad(self, amounts: Mapping[str, float]) -> tuple[float, float]:
        """Return how many requests of a time missed a target, at most and at least."""
        low, high = ([amounts[f"{bound}.{name}"] for name in self._names()] for bound in ("low", "high"))
        most = min(amounts["finished"], sum(high))
        least = min(amounts["finished"], max(low))
        return amounts["bad"] + most, amounts["bad"] + least

    def _burn(self, window: float) -> list[float] | None:
        """Return how many times faster than allowed the budget went in the last `window` seconds, both bounds."""
        spans = [span for span in self.timeline if span.start + span.seconds > self.timeline.end - window]
        amounts = Counter[str]()
        for span in spans:
            amounts.update(span.amounts)
        every = amounts["all"]
        return [bad / every / (1 - self.objective) for bad in self._bad(amounts)] if every else None


def _run(options: argparse.Namespace) -> int:
    targets = {target: getattr(options, target) for target in _TARGETS if getattr(options, target) is not None}
    if not targets:
        msg = "slo needs a target: one of --ttft, --tpot, --e2e, such as --ttft 500ms."
        raise InputError(msg)
    account, basis = _account(Reading(options.files), targets, options.objective)
    if not account.total["all"]:
        msg = "the files hold no finished request."
        raise InputError(msg)
    result = account.to_dict() | {"basis": basis}
    print(json.dumps(result) if options.json else "\n".join(_render(result)))
    return 0 if result["holds"] else 3


def _account(reading: Reading, targets: dict[str, float], objective: float) -> tuple[Account, str]:
    """Return the account of the requests' own lines where (nearly) all have one, else that of the interval lines."""
    of_lines, of_requests = Account(targets, objective), Account(targets, objective)
    if reading.of_client:
        for request in reading.requests():
            of_requests.add_request(request)
        return of_requests, "requests"
    for line in reading:
        if isinstance(line, Snapshot):
            of_lines.add_line(line)
            of_lines.add_refused(line)
            of_requests.add_refused(line)
        elif isinstance(line, RequestLine):
            of_requests.add_request(Request.of_line(line))
    # Of lines, not of what they stand for: a sample's weights add up to all requests too.
    if reading.kinds["request"] and reading.kinds["request"] >= _COVERED * of_lines.total["finished"]:
        return of_requests, "requests"
    return of_lines, "distributions"


def _render(result: dict[str, Any]) -> list[str]:
    wanted = ", ".join(f"{target} within {duration(limit)}" for target, limit in result["targets_seconds"].items())
    verdict = {True: "holds", False: "is missed", None: "cannot be told from distributions alone"}[result["holds"]]
    rows = [
        ("requests", f"{number(result['requests'])} in {duration(result['seconds'])}"),
        ("within all targets", _range([f"{100 * part:.2f} %" for part in result["met"]])),
        (
            "goodput, requests/s",
            _range(["-" if rate is None else number(rate) for rate in result["goodput_per_second"]]),
        ),
        *(
            (f"missed by {target}" if target in result["targets_seconds"] else target, number(count))
            for target, count in result["missed"].items()
        ),
        ("error budget", f"{number(result['budget_requests'])} requests"),
        ("spent", _range([f"{100 * part:.0f} %" for part in result["budget_spent"]])),
        *(
            (f"burn rate, last {window}", _range([f"{rate:.2g}" for rate in rates]) if rates else "-")
            for window, rates in result["burn_rates"].items()
        ),
    ]
    objective = f"{100 * result['objective']:g} % of the requests"
    basis = "each request's line" if result["basis"] == "requests" else "distributions: bounds where a range is shown"
    return [f"{wanted}, for {objective}: the objective {verdict}.", *table(("", ""), rows)[1:], f"(from {basis})"]


def _range(bounds: list[str]) -> str:
    return bounds[0] if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"
