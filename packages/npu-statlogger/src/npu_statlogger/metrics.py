"""Every figure that the lines hold: its name, unit, meaning, the field of vLLM that it stems from, and vLLM's metric.

A figure that vLLM exports to Prometheus has that metric's name, without the prefix "vllm:" and the suffix "_total", and
means the same. Where a metric has a label, its value follows a dot: `request_success.length`. The table itself is
metrics.toml; docs/reference/statistics.md is made from it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

__all__ = ["Kind", "Metric", "describe", "labelled", "metrics", "split_label"]


class Kind(StrEnum):
    """Section of an interval line that a figure stands in."""

    COUNTER = "counters"
    GAUGE = "gauges"
    DISTRIBUTION = "distributions"


@dataclass(frozen=True)
class Metric:
    """One figure."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    sources: tuple[str, ...] = ()
    """Fields of vLLM's records, as `Class.field`; none for what this package counts itself."""

    label: str = ""
    """What the part behind the dot says."""

    own: bool = False
    """Whether vLLM exports no metric `vllm:<name>` that means the same."""

    needs: str = ""
    """The setting of vLLM without which the figure is absent."""


def labelled(name: str, *values: object) -> str:
    """Return the name of a figure with the values of its labels."""
    return f"{name}.{','.join(map(str, values))}" if values else name


def split_label(name: str) -> tuple[str, str]:
    """Return a figure's plain name and its label's value, "" without one."""
    plain, _, label = name.partition(".")
    return plain, label


@cache
def metrics() -> tuple[Metric, ...]:
    """Return all figures in the order of the table."""
    table = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text())
    return tuple(
        Metric(kind=kind, **(entry | {"sources": tuple(entry.get("sources", ()))}))
        for kind in Kind
        for entry in table[kind.value]
    )


def describe(kind: Kind, name: str) -> Metric | None:
    """Return the figure that a name in a line belongs to; None for one that a connector of vLLM brought itself."""
    return _by_name().get((kind, split_label(name)[0]))


@cache
def _by_name() -> dict[tuple[Kind, str], Metric]:
    return {(metric.kind, metric.name): metric for metric in metrics()}
