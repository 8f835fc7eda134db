"""Keeps garbage from being collected while tests are imported: all of it stays, and looking through it took a fifth."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections from here on."""
    gc.freeze()
    gc.enable()
