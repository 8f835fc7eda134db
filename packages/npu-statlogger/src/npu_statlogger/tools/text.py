"""How figures look in a terminal and on a page: units, tables, bars."""

from __future__ import annotations

import math
from datetime import UTC, datetime
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


def sparkline(
    times: Sequence[float], values: Sequence[float | None], cells: int, *, top: float | None = None, span: float = 1.0
) -> str:
    """Return bars from 0 to `top`, or to the largest, over time; a space where there is no value.

    `times` ascend; each value holds for `span` seconds from its time on.
    """
    if not times:
        return ""
    length = times[-1] + span - times[0]
    cells = min(cells, round(length / span))
    groups: list[list[float]] = [[] for _ in range(cells)]
    for when, value in zip(times, values, strict=True):
        if value is not None and not math.isnan(value):
            groups[min(cells - 1, int((when - times[0] + span / 2) / length * cells))].append(value)
    means = [sum(group) / len(group) if group else None for group in groups]
    largest = top or max((mean for mean in means if mean is not None), default=0.0)
    return "".join(
        " " if mean is None else _BARS[0 if largest <= 0 else min(7, int(mean / largest * 7.999))] for mean in means
    )


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
