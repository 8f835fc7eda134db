"""Writes docs/reference/layouts.md from what tests/e2e/test_layouts.py left of each case that passed.

NPU_LAYOUTS_RESULTS=FOLDER pytest tests/e2e/test_layouts.py; python -m tests.support.layouts_page FOLDER > docs/reference/layouts.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.layouts import CASES, KINDS, LAYOUTS, REFUSED
from tests.support.matrix_page import circumstances

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cases_of", "text"]

_HEAD = """# Layouts

What vLLM starts on several npu devices, and which kinds of models say there what they say on one: eight prompts, alone and in
chunks, eight greedy tokens each, in float32, all tokens equal. `nox -s layouts` runs all of it and writes this page; it goes on
where it was interrupted, and does one piece with `-- -k "EP over DP"`. Models are small and random (`tests/support/models.py`).
{date}, commit {commit}, vLLM {vllm}, {processor}.

"""
_NAMES = """
`=`: equal. `·`: the layout is of experts, which this model does not have. `not yet`: not run. Letters are refusals at start:

"""
_TAIL = """
- **TP**, **PP**, **DP**, **DCP**: `--tensor-parallel-size`, `--pipeline-parallel-size`, `--data-parallel-size` and
  `--decode-context-parallel-size`. **EP**: `--enable-expert-parallel`, which gives each rank whole experts.
  **By all-to-all**: `--dcp-comm-backend a2a --dcp-q-replicate`.
- Latent attention and states are of models that have experts as well (DeepSeek-V2, Qwen3-Next). The draft model is the model itself.
- With EP over TP and DP together, ranks share the tokens out before the experts (vLLM's sequence parallelism).
- The external launcher is torchrun: each rank is a process that the user starts, with `distributed_executor_backend="external_launcher"`.
- Behind an external or a hybrid balancer there are two servers, which share experts: of one replica each, or of two.
- Two hosts are two network namespaces, of which the second has a name of its own; there `vllm serve --headless` starts half of the
  ranks, or of the replicas. Ray starts them on two of its nodes.

These layouts, and more that are made of them, run as a pairwise sample with both runners, three modes of graphs and both ways of
scheduling (`tests/support/layout_sample.py`): two thirds of its engines in CI, the others at night.
"""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def text(results: list[dict[str, Any]]) -> str:
    """Return the page of the cases that passed."""
    passed = {(result["layout"], result["kind"]): result["refused"] for result in results}
    return "".join([_HEAD.format(**circumstances()), *_table(passed), _NAMES, *_letters(), _TAIL])


def cases_of(page: str) -> int:
    """Return how many cases a page has."""
    cells = (cell.strip() for line in page.splitlines() if line.startswith("| ") for cell in line.split("|")[2:])
    return sum(bool(re.fullmatch(r"=|[a-z]|not yet", cell)) for cell in cells)


def _table(passed: dict[tuple[str, str], str | None]) -> Iterator[str]:
    yield f"| | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}\n"
    for layout in LAYOUTS:
        yield f"| {layout} | {' | '.join(_cell((layout, kind), passed) for kind in KINDS)} |\n"


def _cell(case: tuple[str, str], passed: dict[tuple[str, str], str | None]) -> str:
    if case not in CASES:
        return "·"
    if case not in passed:
        return "not yet"
    return "=" if passed[case] is None else _letter(passed[case])


def _letter(said: str | None) -> str:
    return next(letter for letter, other in zip(_ALPHABET, _sentences(), strict=False) if other == said)


def _sentences() -> list[str]:
    return list(dict.fromkeys(REFUSED.values()))


def _letters() -> Iterator[str]:
    for letter, said in zip(_ALPHABET, _sentences(), strict=False):
        yield f"- {letter}: {said}\n"


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    sys.stdout.write(text([json.loads(file.read_text()) for file in files]))
