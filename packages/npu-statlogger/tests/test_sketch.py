"""The sketch: its error bound, and merging that loses nothing."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_statlogger.errors import FormatError
from npu_statlogger.sketch import LARGEST, RELATIVE_ERROR, SMALLEST, Sketch

values = st.floats(SMALLEST, LARGEST)
samples = st.lists(values, min_size=1, max_size=300)
quantiles = st.floats(0, 1)


def sketch_of(sample: list[float]) -> Sketch:
    sketch = Sketch()
    sketch.add(sample)
    return sketch


def nearest_rank(sample: list[float], q: float) -> float:
    return sorted(sample)[max(1, math.ceil(q * len(sample))) - 1]


def merged(*parts: Sketch) -> Sketch:
    whole = Sketch()
    for part in parts:
        whole.merge(part)
    return whole


@given(samples, quantiles)
def test_a_quantile_is_within_the_relative_error_of_the_nearest_rank(sample: list[float], q: float) -> None:
    exact = nearest_rank(sample, q)
    assert abs(sketch_of(sample).quantile(q) - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@given(samples)
def test_count_and_extremes_are_exact_and_the_sum_is_rounded_per_value(sample: list[float]) -> None:
    sketch = sketch_of(sample)
    assert (sketch.count, sketch.minimum, sketch.maximum) == (len(sample), min(sample), max(sample))
    assert sketch.quantile(0) >= min(sample)
    assert sketch.quantile(1) <= max(sample)
    assert sketch.total == pytest.approx(math.fsum(sample), rel=1e-12, abs=len(sample) * 1e-9)


@given(samples, samples, samples)
def test_merging_is_associative_and_commutative_and_equals_adding_all(
    a: list[float], b: list[float], c: list[float]
) -> None:
    one, two, three = sketch_of(a), sketch_of(b), sketch_of(c)
    left = merged(merged(one, two), three).to_dict()
    assert left == merged(one, merged(two, three)).to_dict()
    assert left == merged(three, one, two).to_dict()
    assert left == sketch_of(a + b + c).to_dict()


@given(samples)
def test_json_keeps_everything(sample: list[float]) -> None:
    sketch = sketch_of(sample)
    again = Sketch.from_dict(json.loads(json.dumps(sketch.to_dict())))
    assert again.to_dict() == sketch.to_dict()
    assert again.quantile(0.9) == sketch.quantile(0.9)


def test_zero_tiny_and_negative_values_are_counted_as_zero() -> None:
    sketch = sketch_of([0.0, 1e-9, -2.0, 5.0])
    assert sketch.count == 4
    assert sketch.quantile(0.5) == 0.0
    assert sketch.minimum == -2.0
    assert sketch.quantile(1) == pytest.approx(5.0, rel=RELATIVE_ERROR)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e100])
def test_a_value_that_is_not_finite_is_left_out_and_told(value: float) -> None:
    sketch = Sketch()
    assert sketch.add([1.0, value]) == 1
    assert sketch.add([value]) == 1
    assert sketch.add([2.0]) == 0
    assert sketch.add([value, value]) == 2  # whose sum is infinite
    assert (sketch.count, sketch.total) == (2, 3.0)
    assert Sketch.from_dict(sketch.to_dict()).to_dict() == sketch.to_dict()


def test_without_values_there_is_no_quantile() -> None:
    assert math.isnan(Sketch().quantile(0.5))
    assert math.isnan(Sketch().mean)


def test_a_quantile_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch_of([1.0]).quantile(99)


@pytest.mark.parametrize(
    "change",
    [{"count": 3}, {"buckets": [[10**6, 2]]}, {"buckets": "x"}, {"zero": None}, {"buckets": [[0, -2], [1, 4]]}],
)
def test_a_damaged_distribution_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="not a distribution"):
        Sketch.from_dict(sketch_of([1.0, 2.0]).to_dict() | change)
