"""Chooses few rows of choices, one a dimension, in which every two choices that go together do so at least once.

The greedy method of AETG (Cohen, Dalal, Fredman and Patton, IEEE Transactions on Software Engineering 23 (7), 1997)
without its random candidates: a row starts from a pair that is still missing, and takes in each other dimension the
choice that adds most of those. The same dimensions give the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Pair", "Row", "all_pairs", "pairs_of", "rows"]

Choice = tuple[str, str]
"""A dimension and what is chosen in it."""

Pair = frozenset[Choice]
Row = dict[str, str]


def rows(
    dimensions: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], begin: Sequence[Row] = ()
) -> list[Row]:
    """Return the rows of `begin` and more; `allowed` says of a row, or of a part of one, whether it can be.

    The first choice of each dimension must go with all others, so that every allowed pair has a row.
    """
    done = list(begin)
    covered = set[Pair]().union(*map(pairs_of, done))
    missing = [pair for pair in all_pairs(dimensions) if allowed(dict(pair)) and pair not in covered]
    while missing:
        row = _row(dict(missing[0]), dimensions, allowed, set(missing))
        covered = pairs_of(row)
        assert missing[0] in covered
        missing = [pair for pair in missing if pair not in covered]
        done.append({name: row[name] for name in dimensions})
    return done


def all_pairs(dimensions: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Return every two choices of different dimensions."""
    choices = [[(name, value) for value in values] for name, values in dimensions.items()]
    return [
        frozenset(pair) for one, other in itertools.combinations(choices, 2) for pair in itertools.product(one, other)
    ]


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of choices that meet in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _row(row: Row, dimensions: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], missing: set[Pair]) -> Row:
    """Fill a row up, the dimension with the most choices first."""
    for name in sorted(dimensions.keys() - row.keys(), key=lambda name: (-len(dimensions[name]), name)):
        tried = [row | {name: value} for value in dimensions[name] if allowed(row | {name: value})]
        row = max(tried, key=lambda one: len(pairs_of(one) & missing))
    return row
