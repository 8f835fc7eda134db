"""The buckets of distributions as vectors, for what a sketch itself does not answer: shares within, resampling.

Bucket i of a line holds the values in (gamma^(i-1), gamma^i]; index 0 of a vector holds those below SMALLEST.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from npu_statlogger.sketch import LARGEST, RELATIVE_ERROR, SMALLEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npu_statlogger.sketch import Sketch

__all__ = ["SIZE", "VALUES", "counts", "share_within"]

_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_FIRST = math.ceil(math.log(SMALLEST) / _LOG_GAMMA)
_LAST = math.ceil(math.log(LARGEST) / _LOG_GAMMA)

SIZE = _LAST - _FIRST + 2
VALUES: NDArray[np.float64] = np.concatenate(
    [[0.0], np.exp(np.arange(_FIRST, _LAST + 1) * _LOG_GAMMA) * (1 - RELATIVE_ERROR)]
)
"""For each bucket the value that lies within RELATIVE_ERROR of all values in it; float64, (SIZE,)."""


def counts(sketch: Sketch) -> NDArray[np.float64]:
    """Return the values in each bucket, float64 of shape (SIZE,), so that matrices of them multiply fast."""
    vector, line = np.zeros(SIZE), sketch.to_dict()
    if line["count"]:
        vector[0] = line["zero"]
        for bucket, count in line["buckets"]:
            vector[bucket - _FIRST + 1] = count
    return vector


def share_within(sketch: Sketch, limit: float) -> tuple[float, float]:
    """Return the least and the greatest share of values that are at most `limit`; nan without values.

    The two differ by the bucket that the limit cuts through.
    """
    if not sketch.count:
        return math.nan, math.nan
    if limit >= sketch.maximum:
        return 1.0, 1.0
    if limit < sketch.minimum:
        return 0.0, 0.0
    below = np.cumsum(counts(sketch))
    row = 0 if limit < SMALLEST else min(math.ceil(math.log(limit) / _LOG_GAMMA), _LAST) - _FIRST + 1
    return float(below[row - 1] / sketch.count) if row else 0.0, float(below[row] / sketch.count)
