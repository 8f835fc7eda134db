"""How long requests wait for the answer of a tier that is known, or not."""

from __future__ import annotations

import pytest

from npu_kvconnector.tiers.patience import Patience


@pytest.mark.parametrize(
    ("answers", "seconds"),
    [
        ([], 0.5),
        ([0.001] * 15, 0.5),
        ([0.001] * 16, 0.1),
        ([0.001] * 16 + [0.02], 0.2),
        ([0.001] * 16 + [0.3], 0.5),
        ([0.3] + [0.001] * 63, 0.5),
        ([0.3] + [0.001] * 64, 0.1),
    ],
)
def test_a_tier_that_was_quick_has_ten_times_its_slowest_answer(answers: list[float], seconds: float) -> None:
    patience = Patience(0.5)
    for answer in answers:
        patience.note(answer)
    assert patience.seconds == pytest.approx(seconds)


def test_what_the_user_says_is_taken_literally() -> None:
    patience = Patience(6.0, learns=False)
    for _ in range(100):
        patience.note(0.001)
    assert patience.seconds == 6.0
