"""A pairwise sample of layouts: engines over several devices in which every two choices that go together meet once.

A row says how many ranks share what, who starts them, the kind of the model, and how steps are computed and scheduled.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from tests.support import pairs
from tests.support.layouts import EXCHANGED, KINDS, How, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pairs import Row

__all__ = ["DIMENSIONS", "allowed", "how_of", "layout_of", "name_of", "rows"]

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "model": tuple(KINDS),
    "tensor": ("TP 1", "TP 2"),
    "pipeline": ("PP 1", "PP 2"),
    "replicas": ("DP 1", "DP 2"),
    "experts": ("parts of experts", "EP"),
    "context": ("all keys", "DCP 2", "DCP 2 by all-to-all"),
    "starts": ("one host", "external launcher", "two hosts", "external balancer"),
    "runner": ("V1", "V2"),
    "graphs": ("FULL_DECODE_ONLY", "NONE", "PIECEWISE"),
    "scheduling": ("synchronous", "async"),
}
_SIZES = ("tensor", "pipeline", "replicas")
_RULES: tuple[Callable[[Row], bool], ...] = (
    lambda row: (
        row["experts"] != "EP" or (KINDS[row["model"]].experts and {"TP 2", "DP 2"} & set(row.values()) != set())
    ),
    lambda row: row["context"] == "all keys" or row["tensor"] == "TP 2",
    # the same refusals as those of tests/support/layouts.py
    lambda row: row["model"] not in ("draft model", "states") or row["context"] == "all keys",
    lambda row: row["model"] != "draft model" or row["pipeline"] == "PP 1",
    lambda row: row["model"] != "latent attention" or not {"EP", "TP 2", "DP 2"} <= set(row.values()),
    # vLLM: V1 does not schedule stages ahead, V2 has no stages of an external launcher, which has no replicas
    lambda row: not {"V1", "PP 2", "async"} <= set(row.values()),
    lambda row: not {"V2", "PP 2", "external launcher"} <= set(row.values()),
    lambda row: not {"DP 2", "external launcher"} <= set(row.values()),
    # the balancer of those who start replicas of experts themselves
    lambda row: row["starts"] != "external balancer" or {"TP 1", "PP 1", "DP 2", "EP"} <= set(row.values()),
)


@functools.cache
def _masks() -> dict[str, int]:
    """Return for each choice the full rows that have it, as the bits of a number."""
    masks = dict.fromkeys(itertools.chain.from_iterable(DIMENSIONS.values()), 0)
    for number, values in enumerate(itertools.product(*DIMENSIONS.values())):
        row = dict(zip(DIMENSIONS, values, strict=True))
        if 1 <= sum(row[name].endswith("2") for name in _SIZES) <= 2 and all(rule(row) for rule in _RULES):
            for value in values:
                masks[value] |= 1 << number
    return masks


def allowed(row: Row) -> bool:
    """Say whether a row, or a part of one, is of two or four devices, and of what goes together."""
    return functools.reduce(lambda both, value: both & _masks()[value], row.values(), -1) != 0


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return the sample."""
    return tuple(pairs.rows(DIMENSIONS, allowed))


def name_of(row: Row) -> str:
    """Return what a row has beside a plain engine, for people and pytest."""
    chosen = [value for name, value in row.items() if value != DIMENSIONS[name][0]]
    return ", ".join([row["model"], *chosen[row["model"] != DIMENSIONS["model"][0] :]])


def layout_of(row: Row) -> Layout:
    """Return which ranks there are, and who starts them."""
    size = {name: int(row[name][-1]) for name in _SIZES}
    engine: dict[str, Any] = {f"{name}_parallel_size": size[name] for name in ("tensor", "pipeline")}
    changes = {}
    if row["experts"] == "EP":
        engine["enable_expert_parallel"] = True
    if row["context"] != "all keys":
        engine |= {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4}
        engine |= EXCHANGED if row["context"] == "DCP 2 by all-to-all" else {}
        changes["num_key_value_heads"] = 1
    starts = {"external launcher": "launcher", "two hosts": "hosts", "external balancer": "servers"}.get(row["starts"])
    if starts == "hosts":
        engine["data_parallel_size"] = size["replicas"]
    by_one = "replicas" if size["replicas"] > 1 else "engine"
    devices = size["tensor"] * size["pipeline"] * size["replicas"]
    return Layout(engine, devices, starts or by_one, changes)


def how_of(row: Row) -> How:
    """Return how its steps are computed and scheduled."""
    engine = {
        "compilation_config": {"cudagraph_mode": row["graphs"]},
        "async_scheduling": row["scheduling"] == "async",
        "enforce_eager": row["graphs"] == "NONE",
    }
    return How(engine, {"VLLM_USE_V2_MODEL_RUNNER": "1"} if row["runner"] == "V2" else {})
