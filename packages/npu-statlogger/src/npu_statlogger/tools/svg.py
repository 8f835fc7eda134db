"""Plots over time as inline SVG: lines that break where there is nothing, and a figure for each span on hovering.

Colours are the page's CSS variables --c0, --c1, ..., so that one plot suits light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from npu_statlogger.tools.text import clock

__all__ = ["Curve", "Plot", "draw"]

Points = Sequence[float | None]

_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 12, 24
_DECADES_FOR_LOG = 1.5


@dataclass(frozen=True)
class Curve:
    """One line of a plot; None leaves a gap. `faint` ones are drawn thin, `area` ones are filled down to 0."""

    label: str
    values: Points
    color: int = 0
    faint: bool = False
    area: bool = False


@dataclass(frozen=True)
class Plot:
    """Curves over the same times (seconds since the epoch, each the middle of a span)."""

    title: str
    times: Sequence[float]
    curves: Sequence[Curve]
    unit: Callable[[float], str]
    span: float
    """Seconds that a point stands for."""

    marks: Sequence[tuple[float, float, str]] = ()
    """Stretches of time to mark, with what they mean."""

    top: float | None = None
    """Upper end of the scale where it is known, such as 1 for a share."""


def draw(plot: Plot) -> str:
    """Return the plot as an SVG element."""
    values = [value for curve in plot.curves for value in curve.values if value is not None]
    scale = _Scale(values, plot.top, logarithmic=plot.top is None and not any(curve.area for curve in plot.curves))
    times = _Times(plot.times, plot.span)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
        *(_mark(times, *mark) for mark in plot.marks),
        *([f'<text x="{_WIDTH - _RIGHT}" y="8" text-anchor="end">logarithmic</text>'] if scale.logarithmic else []),
        *(_level(scale, value, plot.unit(value)) for value in scale.ticks()),
        *(_moment(times, when, text) for when, text in times.ticks()),
        *(_curve(curve, times, scale) for curve in plot.curves),
        *_hovers(plot, times),
        "</svg>",
    ]
    return "".join(parts)


class _Scale:
    """Maps values to heights: from 0, or in decades where values differ by more than a plot can show from 0."""

    def __init__(self, values: Sequence[float], top: float | None, *, logarithmic: bool) -> None:
        high = top or max(values, default=1.0) or 1.0
        positive = [value for value in values if value > 0]
        low = min(positive, default=high)
        self.logarithmic = logarithmic and math.log10(high / low) > _DECADES_FOR_LOG and len(positive) == len(values)
        step = _step(high / 4)
        linear = (0.0, top or math.ceil(high * 1.02 / step) * step)
        self._low, self._high = (low / 1.15, high * 1.15) if self.logarithmic else linear
        self._step = step

    def y(self, value: float) -> float:
        if self.logarithmic:
            part = math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        else:
            part = value / self._high
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            count = round(self._high / self._step)
            return [index * self._step for index in range(count + 1)]
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        factors = (1.0,) if last - first > 3 else (1.0, 3.0)
        marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        return [mark for mark in marks if self._low <= mark <= self._high]


class _Times:
    """Maps times to the width of the plot."""

    def __init__(self, times: Sequence[float], span: float) -> None:
        self.all = times
        self.gap = span
        self.first, self.last = times[0] - self.gap / 2, times[-1] + self.gap / 2

    def x(self, when: float) -> float:
        part = (min(max(when, self.first), self.last) - self.first) / (self.last - self.first)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[tuple[float, str]]:
        length = self.last - self.first
        steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
        step = next((step for step in steps if length / step <= 6), 86400 * math.ceil(length / 86400 / 6))
        first = math.ceil(self.first / step) * step
        marks = [first + index * step for index in range(int((self.last - first) / step) + 1)]
        return [(mark, _moment_text(mark, step)) for mark in marks]


def _moment_text(when: float, step: float) -> str:
    day, time = clock(when).split()
    if step >= 86400 or time == "00:00:00":
        return day[5:]
    return time if step < 60 else time[:5]


def _step(rough: float) -> float:
    """Return the next 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)


def _curve(curve: Curve, times: _Times, scale: _Scale) -> str:
    parts = []
    for piece in _pieces(curve.values, times):
        points = [(times.x(when), scale.y(value)) for when, value in piece]
        if len(points) == 1:
            parts.append(
                f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="1.6" fill="var(--c{curve.color})"/>'
            )
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if curve.area:
            low = _HEIGHT - _BOTTOM
            closed = f"M{points[0][0]:.1f} {low}L{path}L{points[-1][0]:.1f} {low}Z"
            parts.append(f'<path d="{closed}" fill="var(--c{curve.color})" opacity=".15"/>')
        style = 'stroke-width="1" opacity=".7"' if curve.faint else 'stroke-width="1.75"'
        parts.append(f'<path d="M{path}" fill="none" stroke="var(--c{curve.color})" {style} stroke-linejoin="round"/>')
    return "".join(parts)


def _pieces(values: Points, times: _Times) -> list[list[tuple[float, float]]]:
    """Cut a curve where a value is missing or two spans are not neighbours."""
    pieces: list[list[tuple[float, float]]] = []
    last = -math.inf
    for when, value in zip(times.all, values, strict=True):
        if value is None:
            continue
        if when - last > 1.5 * times.gap:
            pieces.append([])
        pieces[-1].append((when, value))
        last = when
    return pieces


def _level(scale: _Scale, value: float, text: str) -> str:
    y = scale.y(value)
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'


def _moment(times: _Times, when: float, text: str) -> str:
    x = times.x(when)
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 4}" class="axis"/>'
    return f'{line}<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(text)}</text>'


def _mark(times: _Times, start: float, end: float, text: str) -> str:
    left, right = times.x(start), times.x(end)
    width = max(right - left, 2.0)
    box = f'<rect x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" class="mark">'
    return f"{box}<title>{escape(text)}</title></rect>"


def _hovers(plot: Plot, times: _Times) -> list[str]:
    """Return an invisible box for each span that shows its figures; what is marked there is said too."""
    width = max(times.x(times.first + times.gap) - _LEFT, 1.0)
    boxes = []
    for index, when in enumerate(plot.times):
        lines = [clock(when)]
        for curve in plot.curves:
            value = curve.values[index]
            lines.append(f"{curve.label}: {'-' if value is None else plot.unit(value)}")
        lines += [text for start, end, text in plot.marks if start <= when <= end]
        x = times.x(when) - width / 2
        box = f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" class="hover">'
        boxes.append(f"{box}<title>{escape(chr(10).join(lines))}</title></rect>")
    return boxes
