"""Engines that are killed while their durable tier stores: what is left are the blocks that an engine computes."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.engine_kills import kill_engines

if TYPE_CHECKING:
    from pathlib import Path

KILLS, LOST = 100, 5
"""Engines, and every how many-th takes the page cache with it."""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the journal of calls is made by a C library")
def test_killed_engines_leave_no_block_that_is_not_what_is_computed(tmp_path: Path) -> None:
    found = kill_engines(tmp_path / "kills", kills=KILLS, seed=1, lost=LOST, lanes=2)
    print(dataclasses.asdict(found))  # the counts of the night
    assert found.is_good, found
    assert (found.kills, found.caches_lost) == (KILLS, KILLS // LOST)
    assert found.checked > 10 * KILLS
    assert found.loaded > found.asked_again // 2 > 0
    assert found.adopted > 0  # some kills came between a store and its transaction
    assert found.lost > 0
