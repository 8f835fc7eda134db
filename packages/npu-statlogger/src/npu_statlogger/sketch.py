"""A distribution in constant memory: quantiles within 1 %, exact count, sum and extremes, exact merge.

Method: logarithmic buckets as in DDSketch (Masson, Rim, Lee, VLDB 2019, "DDSketch: A fast and fully-mergeable
quantile sketch with relative-error guarantees"), with a fixed range instead of collapsing buckets. All state is
integer counts, an integer sum and two extremes, so that merging is associative, commutative and loses nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_statlogger.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ABSURD", "LARGEST", "NANO", "RELATIVE_ERROR", "SMALLEST", "Sketch", "is_bounded"]

RELATIVE_ERROR = 0.01
SMALLEST, LARGEST = 1e-6, 1e9
"""Values in this range keep the relative error; below it they count as 0, above it as LARGEST (extremes stay exact)."""

ABSURD = 1e100
"""Values from here on are left out as those that are not finite: their sums would soon be more than a float holds."""

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_FIRST = math.ceil(math.log(SMALLEST) / _LOG_GAMMA)
_LAST = math.ceil(math.log(LARGEST) / _LOG_GAMMA)
NANO = 10**9


class Sketch:
    """Distribution of the values added so far; bucket i holds the values in (gamma^(i-1), gamma^i]."""

    def __init__(self) -> None:
        self.count = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._sum_nano = 0
        # Row 0 counts values below SMALLEST, row i + 1 - _FIRST bucket i.
        self._counts = np.zeros(_LAST - _FIRST + 2, dtype=np.int64)

    def add(self, values: Sequence[float]) -> int:
        """Add values in any order and return how many were left out because they are not finite or beyond 1e100.

        Negative values (a clock stepped back) count as 0 and are seen in the minimum.
        """
        array = np.asarray(values, dtype=np.float64)
        array = array[np.abs(array) < ABSURD]  # false for nan, too
        if not len(array):
            return len(values)
        inside = np.clip(array, SMALLEST, LARGEST)
        rows = np.ceil(np.log(inside) / _LOG_GAMMA).astype(np.int64) - _FIRST + 1
        rows[array < SMALLEST] = 0
        np.add.at(self._counts, rows, 1)
        self.count += len(array)
        self.minimum = min(self.minimum, float(array.min()))
        self.maximum = max(self.maximum, float(array.max()))
        whole = np.floor(array)
        self._sum_nano += int(whole.sum()) * NANO + int(np.rint((array - whole) * NANO).sum())
        return len(values) - len(array)

    def merge(self, other: Sketch) -> None:
        """Take in all values of `other`."""
        self.count += other.count
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self._sum_nano += other._sum_nano
        self._counts += other._counts

    @property
    def total(self) -> float:
        """Sum of the values, each rounded to 1e-9."""
        return self._sum_nano / NANO

    @property
    def mean(self) -> float:
        """Arithmetic mean; nan without values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Return the value of rank ceil(q * count), within RELATIVE_ERROR of it; nan without values."""
        if not 0 <= q <= 1:
            msg = f"a quantile lies between 0 and 1; got {q}."
            raise ValueError(msg)
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(q * self.count))
        row = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(_estimate(row) if row else 0.0, self.minimum), self.maximum)

    def estimates(self) -> tuple[int, list[tuple[float, int]]]:
        """Return how many values count as 0, and of each other bucket an estimate of its values and their number."""
        rows = np.flatnonzero(self._counts[1:]) + 1
        return int(self._counts[0]), [(_estimate(int(row)), int(self._counts[row])) for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return everything that `from_dict` needs, ready for JSON; the bucket list holds [i, count] pairs."""
        if not self.count:
            return {"count": 0}
        rows = np.flatnonzero(self._counts[1:])
        return {
            "count": self.count,
            "sum_nano": self._sum_nano,
            "min": self.minimum,
            "max": self.maximum,
            "zero": int(self._counts[0]),
            "buckets": [[int(row) + _FIRST, int(self._counts[row + 1])] for row in rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sketch:
        """Rebuild a sketch.

        Raises:
            FormatError: a field is missing, a bucket or a number is out of range, or the counts do not add up.
        """
        sketch = cls()
        try:
            if data["count"] == 0:
                return sketch
            sketch.count, sketch._sum_nano = int(data["count"]), int(data["sum_nano"])
            sketch.minimum, sketch.maximum = float(data["min"]), float(data["max"])
            sketch._counts[0] = int(data["zero"])
            for bucket, count in data["buckets"]:
                if not _FIRST <= bucket <= _LAST:
                    msg = f"bucket {bucket} is outside {_FIRST}..{_LAST}"
                    raise ValueError(msg)
                sketch._counts[int(bucket) - _FIRST + 1] += int(count)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            msg = f"not a distribution: {error}."
            raise FormatError(msg) from error
        if not all(map(is_bounded, (sketch._sum_nano, sketch.minimum, sketch.maximum))):
            msg = "not a distribution: a number of it is beyond all bounds."
            raise FormatError(msg)
        if sketch.count != int(sketch._counts.sum()) or (sketch._counts < 0).any():
            msg = (
                f"not a distribution: its buckets hold {int(sketch._counts.sum())} values, its count is {sketch.count}."
            )
            raise FormatError(msg)
        return sketch


def is_bounded(number: float) -> bool:
    """Tell whether a number of a line is finite, and sums of such numbers are too."""
    return abs(number) < ABSURD**2


def _estimate(row: int) -> float:
    return 2 * _GAMMA ** (row - 1 + _FIRST) / (_GAMMA + 1)
