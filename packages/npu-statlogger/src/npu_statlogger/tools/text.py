"""How figures look in a terminal and on a page: units, tables, bars."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["clock", "duration", "figure", "number", "sparkline", "table"]

_BARS = "▁▂▃▄▅▆▇█"


def figure(name: str, value: float | None) -> str:
    """Return a value of the distribution or rate `name` with its unit; a dash where there is none."""
    if value is None or math.isnan(value):
        return "-"
    if name.endswith("_seconds"):
        return duration(value)
    if name.endswith(("_rate", "_perc")):
        return f"{100 * value:.1f} %"
    return number(value) + ("/s" if name.endswith("_per_second") else "")


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it, in three digits: 12.3 ms, 4.56 s, 2 h 05 min."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"


def number(value: float) -> str:
    """Return a number in three digits, from 10,000 on in thousands, millions or billions."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= factor:
            return f"{value / (factor if factor != 1e4 else 1e3):.3g}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def clock(when: float, *, day: bool = True) -> str:
    """Return a time since the epoch in UTC."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Return `values` as bars from 0 to `top`, or to their largest, in at most `width` characters; spaces for None."""
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [
        _mean([value for value in values[low:high] if value is not None and not math.isnan(value)])
        for low, high in pairwise(edges)
    ]
    if top is None:
        top = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(" " if mean is None else _BARS[0 if top <= 0 else min(7, int(mean / top * 7.999))] for mean in means)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return aligned lines; the first `left` columns are flush left, the rest flush right."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
