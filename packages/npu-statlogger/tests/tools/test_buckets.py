"""Shares below a limit, from buckets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from npu_statlogger.sketch import RELATIVE_ERROR, Sketch
from npu_statlogger.tools.buckets import SIZE, VALUES, counts, share_within


def test_the_share_lies_between_its_bounds() -> None:
    values = np.random.default_rng(0).lognormal(-2, 1, 5000)
    sketch = Sketch()
    sketch.add(values.tolist())
    for limit in np.quantile(values, [0.001, 0.1, 0.5, 0.9, 0.999]):
        low, high = share_within(sketch, float(limit))
        share = float((values <= limit).mean())
        assert low <= share <= high
        assert high - low < 0.03
    assert share_within(sketch, values.max()) == (1.0, 1.0)
    assert share_within(sketch, values.min() * 0.9) == (0.0, 0.0)


def test_without_values_there_is_no_share() -> None:
    assert all(math.isnan(share) for share in share_within(Sketch(), 1.0))


def test_a_limit_below_the_smallest_bucket_counts_zeros() -> None:
    sketch = Sketch()
    sketch.add([0.0, 0.0, 1e-7, 1.0])
    assert share_within(sketch, 1e-7) == (0.0, 0.75)


def test_a_vector_holds_each_value_within_the_error_of_its_buckets_value() -> None:
    values = np.geomspace(1e-6, 1e9, 200)
    for value in values:
        sketch = Sketch()
        sketch.add([float(value)])
        vector = counts(sketch)
        assert vector.shape == VALUES.shape == (SIZE,)
        assert VALUES[vector.argmax()] == pytest.approx(value, rel=RELATIVE_ERROR * 1.0001)
