"""`npu-stat diff A B`: two runs side by side, with confidence intervals of what changed.

Method: block bootstrap (Carlstein 1986; Kuensch 1989). Steps and requests that follow one another resemble one
another, so not single values are drawn again but blocks of time, each with all it holds; the length of a block grows
with the cube root of their number. Percentile intervals are widened for few blocks as in Hesterberg, "What Teachers
Should Know About the Bootstrap" (2015), and percentiles by the error of the buckets that they are read from.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from npu_statlogger.sketch import RELATIVE_ERROR
from npu_statlogger.snapshot import Snapshot
from npu_statlogger.tools import names
from npu_statlogger.tools.arguments import share
from npu_statlogger.tools.buckets import VALUES, counts
from npu_statlogger.tools.source import Reading
from npu_statlogger.tools.text import figure, table
from npu_statlogger.tools.timeline import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from npu_statlogger.tools.arguments import Commands

    Vector = NDArray[np.float64]

__all__ = ["Change", "Run", "add", "compare"]

CONFIDENCE = 0.95
FEWEST_BLOCKS = 8
"""With fewer there is no interval: too little is known of how the figures vary."""

_SPANS = 128
_LARGE = 11.0
"""Ratios from here on are not told apart."""

_DRAWS = 2000
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_RATES = {
    "generation_tokens_per_second": (names.GENERATED, None),
    "prompt_tokens_total_per_second": ("prompt_tokens", None),
    "requests_per_second": (names.FINISHED, None),
    "prefix_cache_hit_rate": ("prefix_cache_hits", "prefix_cache_queries"),
    "external_prefix_cache_hit_rate": ("external_prefix_cache_hits", "external_prefix_cache_queries"),
    "draft_acceptance_rate": (names.ACCEPTED, names.DRAFTED),
}
"""Rate -> counter, and the counter that it is divided by (None: seconds). More is better in each."""


@dataclass(frozen=True)
class Change:
    """One figure of both runs. `ratio` is B over A; None where it cannot be told, as `low` and `high`."""

    name: str
    statistic: str
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None
    more_is_better: bool

    @property
    def verdict(self) -> str:
        """Return better, worse, same (the interval holds 1), or unknown (there is none)."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 1 <= self.high:
            return "same"
        return "better" if (self.low > 1) == self.more_is_better else "worse"

    def worse_than(self, part: float) -> bool:
        """Tell whether B is surely worse by more than `part`."""
        if self.low is None or self.high is None:
            return False
        return self.high < 1 - part if self.more_is_better else self.low > 1 + part


@dataclass(frozen=True)
class Side:
    """A figure of one run, and what it is in each draw of `blocks` blocks; None where these are too few."""

    value: float
    draws: Vector | None = None
    blocks: int = 0


class Run:
    """One run: its figures, and blocks of time to draw from; two runs that are compared need different seeds."""

    def __init__(self, snapshots: Iterable[Snapshot], seed: int) -> None:
        self.whole = Snapshot()
        timeline = Timeline(_SPANS, sketches=names.LATENCIES)
        for snapshot in snapshots:
            snapshot.counters[names.FINISHED] = names.finished(snapshot.counters)
            self.whole.merge(snapshot)
            timeline.add(snapshot)
        self.blocks = _blocks(list(timeline))
        self.draws: Vector | None = None
        if len(self.blocks) >= FEWEST_BLOCKS:
            size = len(self.blocks)
            draws = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), _DRAWS)
            self.draws = draws.astype(np.float64)

    def drawn(self, values: Sequence[float]) -> Vector:
        """Return the sums over each draw of one value a block; float64 of shape (draws,)."""
        assert self.draws is not None
        return self.draws @ np.asarray(values, dtype=np.float64)

    def drawn_quantiles(self, name: str) -> dict[str, Vector]:
        """Return for each percentile its value in each draw."""
        assert self.draws is not None
        blocks = np.stack([counts(block.sketches[name]) for block in self.blocks])
        used = np.flatnonzero(blocks.any(axis=0))  # most buckets are empty in all blocks
        ranks = np.cumsum(self.draws @ blocks[:, used], axis=1)
        found = {}
        for label, q in _QUANTILES.items():
            rank = np.maximum(1, np.ceil(q * ranks[:, -1:]))
            found[label] = VALUES[used[np.minimum((ranks < rank).sum(axis=1), len(used) - 1)]]
        return found


def compare(a: Run, b: Run) -> Iterator[Change]:
    """Yield what both runs have, in a fixed order: rates, then latencies."""
    for name, (part, whole) in _RATES.items():
        left, right = _rate(a, part, whole), _rate(b, part, whole)
        if left.value or right.value:
            yield _change(name, "rate", left, right, more_is_better=True)
    for name in names.LATENCIES:
        if all(run.whole.distributions[name].count for run in (a, b)):
            sides = [_latency(run, name) for run in (a, b)]
            for statistic in sides[0]:
                yield _change(name, statistic, sides[0][statistic], sides[1][statistic], more_is_better=False)


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("diff", help="two runs side by side, with confidence intervals")
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a file, as of `summary`")
    text = "exit with 3 if a figure of B is worse by more than this, beyond its interval (such as 5%%)"
    parser.add_argument("--fail-over", type=share, metavar="SHARE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # Fixed seeds: the same files give the same answer.
    a, b = (Run(Reading([file]).snapshots(), seed) for seed, file in enumerate((options.a, options.b)))
    changes = list(compare(a, b))
    blocks = [len(run.blocks) for run in (a, b)]
    if options.json:
        rows = [asdict(change) | {"verdict": change.verdict} for change in changes]
        print(json.dumps({"confidence": CONFIDENCE, "blocks": blocks, "changes": rows}))
    else:
        print("\n".join(_render(changes, options, blocks)))
    if options.fail_over is not None and any(change.worse_than(options.fail_over) for change in changes):
        return 3
    return 0


def _render(changes: list[Change], options: argparse.Namespace, blocks: list[int]) -> Iterator[str]:
    yield f"A: {options.a}"
    yield f"B: {options.b}"
    heads = ("", "", "A", "B", "change", f"{100 * CONFIDENCE:g} % interval", "")
    rows, last = [], ""
    for change in changes:
        shown, last = "" if change.name == last else names.label(change.name), change.name
        values = [figure(change.name, value) for value in (change.a, change.b)]
        interval = "-" if change.low is None else f"{_percent(change.low)} to {_percent(change.high)}"
        verdict = {"same": "", "unknown": "?"}.get(change.verdict, change.verdict)
        statistic = "" if change.statistic == "rate" else change.statistic
        rows.append((shown, statistic, *values, _percent(change.ratio), interval, verdict))
    yield from ("", *table(heads, rows, left=2), "")
    if min(blocks) < FEWEST_BLOCKS:
        yield f"No intervals: {min(blocks)} blocks of time are too few to tell how the figures vary; run longer, or"
        yield "with a shorter NPU_STATLOGGER_INTERVAL (of `vllm bench serve`: with --save-detailed)."
    else:
        yield f"Each interval by itself holds the true change with {100 * CONFIDENCE:g} %, if the load was the same; of"
        yield "20 rows one may differ by chance."


def _blocks(spans: list[Span]) -> list[Span]:
    """Join spans to blocks of about the cube root of their number, but to no fewer than FEWEST_BLOCKS."""
    length = max(1, min(round(len(spans) ** (1 / 3)), len(spans) // FEWEST_BLOCKS))
    blocks = []
    for index, span in enumerate(spans):
        if index % length == 0:
            blocks.append(Span(span.start, 0.0))
        blocks[-1].seconds += span.seconds
        blocks[-1].merge(span)
    return blocks


def _rate(run: Run, part: str, whole: str | None) -> Side:
    below = run.whole.counters[whole] if whole else run.whole.seconds
    value = run.whole.counters[part] / below if below else 0.0
    if run.draws is None:
        return Side(value)
    parts = run.drawn([block.amounts[part] for block in run.blocks])
    wholes = run.drawn([block.amounts[whole] if whole else block.seconds for block in run.blocks])
    return Side(value, parts / np.where(wholes > 0, wholes, np.nan), len(run.blocks))


def _latency(run: Run, name: str) -> dict[str, Side]:
    sketch = run.whole.distributions[name]
    values = {"mean": sketch.mean} | {label: sketch.quantile(q) for label, q in _QUANTILES.items()}
    if run.draws is None:
        return {label: Side(value) for label, value in values.items()}
    sums = run.drawn([block.sketches[name].total for block in run.blocks])
    drawn = {"mean": sums / np.maximum(run.drawn([block.sketches[name].count for block in run.blocks]), 1)}
    drawn |= run.drawn_quantiles(name)
    return {label: Side(values[label], draws, len(run.blocks)) for label, draws in drawn.items()}


def _change(name: str, statistic: str, a: Side, b: Side, *, more_is_better: bool) -> Change:
    ratio = b.value / a.value if a.value > 0 else None
    low = high = None
    if ratio is not None and a.draws is not None and b.draws is not None:
        low, high = _interval(a.draws, b.draws, min(a.blocks, b.blocks), slack=statistic in _QUANTILES)
    return Change(name, statistic, a.value, b.value, ratio, low, high, more_is_better)


def _interval(a: Vector, b: Vector, blocks: int, *, slack: bool) -> tuple[float | None, float | None]:
    """Return the interval of b over a; with `slack` wider by what buckets leave open of either."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(b) - np.log(a)
    ratios = ratios[np.isfinite(ratios)]
    if len(ratios) < 0.9 * _DRAWS:  # in some blocks there is nothing to measure
        return None, None
    normal = NormalDist()
    widened = math.sqrt(blocks / (blocks - 1)) * _student(normal.inv_cdf((1 + CONFIDENCE) / 2), blocks - 1)
    tail = normal.cdf(-widened)
    low, high = np.quantile(ratios, [tail, 1 - tail])
    open_part = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)) if slack else 0.0
    return math.exp(low - open_part), math.exp(high + open_part)


def _student(z: float, freedom: int) -> float:
    """Return Student's quantile to the normal one `z` (Abramowitz and Stegun 26.7.5)."""
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{100 * (ratio - 1):+.1f} %" if ratio < _LARGE else f"> {100 * (_LARGE - 1):+.0f} %"
