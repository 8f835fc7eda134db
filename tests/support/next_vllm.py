"""A pytest plugin for `nox -s next`: the tests that do not pass on the next vLLM, from next_vllm.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

KNOWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for entry in KNOWN["tests"]:
            if item.nodeid.startswith(entry["test"]):
                # Not strict, since an entry may stand for several cases of a test.
                item.add_marker(pytest.mark.xfail(reason=entry["why"], strict=False, run=entry.get("run", True)))
