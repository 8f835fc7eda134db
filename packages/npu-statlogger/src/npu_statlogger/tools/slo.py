"""`npu-stat slo`: which part of the requests met the targets, the goodput, and what is left of the error budget.

Where each request has a line the answer is exact. From distributions alone one knows for each target how many requests
missed it, not which: then the part that met all of them lies between two bounds, and both are shown.
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
    """Requests in all, and how many of them missed a target: at least `least`, at most `most`."""

    targets: dict[str, float]
    objective: float
    timeline: Timeline = field(default_factory=lambda: Timeline(_SPANS))
    total: Counter[str] = field(default_factory=Counter)
    """all, least, most, and the misses by target."""

    def add_line(self, line: Snapshot) -> None:
        """Count finished requests from distributions; one that failed has missed."""
        failed = line.counters[f"{names.FINISHED}error"]
        missed: dict[str, tuple[float, float]] = {_OTHERS: (failed, failed)}
        for target, limit in self.targets.items():
            sketch = line.distributions.get(_TARGETS[target])
            if sketch is not None and sketch.count:
                low, high = share_within(sketch, limit)
                missed[target] = (sketch.count * (1 - high), sketch.count * (1 - low))
        every = names.finished(line.counters)
        least = min(every, max(low for low, _ in missed.values()))
        most = min(every, sum(high for _, high in missed.values()))
        self._add(line.start, line.end, every, least, most, {target: high for target, (_, high) in missed.items()})

    def add_refused(self, line: Snapshot) -> None:
        """Count requests that were refused; they have no line of their own."""
        count = sum(count for name, count in line.counters.items() if name.startswith(names.REJECTED))
        if count:
            self._add(line.start, line.end, count, count, count, {_OTHERS: count})

    def add_request(self, request: Request) -> None:
        """Count one request."""
        values = {"ttft": request.ttft, "tpot": request.tpot, "e2e": request.e2e}
        late = {target for target, limit in self.targets.items() if (values[target] or 0.0) > limit}
        missed = late | ({_OTHERS} if request.reason == "error" else set())
        bad = request.weight if missed else 0.0
        self._add(request.end, request.end, request.weight, bad, bad, dict.fromkeys(missed, request.weight))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data; of two bounds the first is the worse."""
        every = self.total["all"]
        length = max(self.timeline.end - self.timeline.start, 0.0)
        met = [1 - self.total["most"] / every, 1 - self.total["least"] / every]
        budget = every * (1 - self.objective)
        return {
            "targets_seconds": self.targets,
            "objective": self.objective,
            "requests": every,
            "seconds": length,
            "met": met,
            "holds": True if met[0] >= self.objective else (False if met[1] < self.objective else None),
            "goodput_per_second": [part * every / length if length else None for part in met],
            "missed": {target: self.total[target] for target in (*self.targets, _OTHERS)},
            "budget_requests": budget,
            "budget_spent": [self.total[bound] / budget for bound in ("most", "least")],
            "burn_rates": {name: self._burn(window) for name, window in _WINDOWS.items() if window < length},
        }

    def _add(self, start: float, end: float, every: float, least: float, most: float, missed: dict[str, float]) -> None:
        counts = Counter({"all": every, "least": least, "most": most} | missed)
        self.total.update(counts)
        self.timeline.add(Snapshot(start, end, counters=counts))

    def _burn(self, window: float) -> list[float] | None:
        """Return how many times faster than allowed the budget went in the last `window` seconds, both bounds."""
        spans = [span for span in self.timeline if span.start + span.seconds > self.timeline.end - window]
        every = sum(span.amounts["all"] for span in spans)
        bounds = [sum(span.amounts[bound] for span in spans) for bound in ("most", "least")]
        return [missed / every / (1 - self.objective) for missed in bounds] if every else None


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
    if reading.kinds["request"] and of_requests.total["all"] >= _COVERED * of_lines.total["all"]:
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
