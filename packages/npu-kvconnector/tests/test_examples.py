"""Each --kv-transfer-config that the documentation shows is one that a server would take."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from npu_kvconnector import CONNECTOR
from npu_kvconnector.cli import check
from tests.support.environments import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("vllm")


def examples() -> Iterator[Any]:
    pages = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/npu-kvconnector/*.md")])
    for page in pages:
        text = page.read_text()
        for match in re.finditer(r'\{\s*"kv_connector"', text):
            found, _ = json.JSONDecoder().raw_decode(text[match.start() :])
            if found["kv_connector"] == CONNECTOR:  # others read their options themselves
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(found.get("kv_connector_extra_config", {}), id=f"{page.relative_to(ROOT)}:{line}")


EXAMPLES = list(examples())


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("extra_config", EXAMPLES)
def test_an_example_is_taken(extra_config: dict[str, Any]) -> None:
    problems = check(json.dumps(extra_config))["problems"]
    assert not [problem for problem in problems if problem.startswith("--config")]
