"""A store in a folder of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.durable_store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npu_kvconnector.tiers.durable.store import DurableStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[DurableStore]:
    opened = open_store(folder)
    yield opened
    opened.close()
