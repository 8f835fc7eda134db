"""Writes docs/reference/features.md from what tests/e2e/test_matrix.py left of each engine that passed.

NPU_MATRIX_RESULTS=FOLDER pytest tests/e2e/test_matrix.py; python -m tests.support.matrix_page FOLDER > docs/reference/features.md
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import pairs
from tests.support.environments import ROOT
from tests.support.features import APART, DIMENSIONS, those_beside_the_baselines

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["circumstances", "features_of", "text"]

_HEAD = """# Features together

Which features of vLLM run together on npu. Each number counts the engines that had both features, and maybe more, and said
what the eager engine without them says. `nox -s matrix` starts them and writes this page: {count} engines in float32 and in
bfloat16 each, chosen so that every feature is there alone and every two that go together are in one (pairwise design). The
figures are of {date}, commits up to {commit}, vLLM {vllm}, {processor}.
{runners}

- **Asked** are eight requests in a batch, greedy: two with penalties, two with a grammar, one with few tokens to choose from. Then the
  same with longer prompts. Models are small and random (`tests/support/models.py`); with adapters three of the requests have one.
- **The baseline** has the same model, weights, kind of cache and adapters, and no other feature: eager, whole prompts,
  synchronous, one device. That those four are right is tested against transformers elsewhere ([Tests](../developer_guide/tests.md)).
- **Passed** means that tokens are equal, or that noise has chosen between two: logprobs differ from the baseline's by at most 1.5
  times what the baseline in bfloat16 differs from itself in float32, and in float32 by a fiftieth of that (by as much where activations
  or the cache are rounded, twice where both are: a value that noise moves by a step moves others).

"""
_AFTER = """
`·`: of one kind, an engine has one of them. `not yet`: no engine with both has run and passed. Letters:

"""
_NOISE = """
## How near

Of the engines with each feature: how many, the share of requests with all tokens equal in float32, and the largest distance in
bfloat16 as a multiple of the baseline's own noise.

| | feature | engines | equal in float32 | distance in bfloat16 |
|---|---|---|---|---|
"""


def text(results: list[dict[str, Any]]) -> str:
    """Return the page of the engines that passed."""
    about = {"count": len(results), "runners": _runners(results), **circumstances()}
    return "".join([_HEAD.format(**about), *_table(results), _AFTER, *_letters(), _NOISE, *_nearness(results)])


def _runners(results: list[dict[str, Any]]) -> str:
    """Say which of vLLM's runners the engines had."""
    on = Counter(result["runner"] for result in results)
    if on.keys() == {"V2"}:
        return "All ran on vLLM's V2 model runner."
    parts = " and ".join(f"{count} on {runner}" for runner, count in sorted(on.items(), reverse=True))
    return (
        f"npu chose [vLLM's runner](../user_guide/v2_runner.md#which-runner-an-engine-has) for each: {parts}, "
        "which has what V2 has not."
    )


def features_of(page: str) -> list[str]:
    """Return the features of a page's first table."""
    return re.findall(r"^\| \d+ \| ([^|]+) \|", page.partition(_AFTER)[0], re.MULTILINE)


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    names = those_beside_the_baselines()
    together = Counter(pair for result in results for pair in pairs.pairs_of(result["row"]))
    yield f"| | | {' | '.join(str(number) for number in range(1, len(names) + 1))} |\n|---|---|{'---|' * len(names)}\n"
    for number, one in enumerate(names):
        cells = [_cell(one, other, together) for other in names[:number]]
        yield f"| {number + 1} | {one} | {' | '.join(cells)}{' | ' if cells else ''}{'| ' * (len(names) - number)}\n"


def _cell(one: str, other: str, together: Counter[pairs.Pair]) -> str:
    kinds = {name: kind for kind, names in DIMENSIONS.items() for name in names}
    if kinds[one] == kinds[other]:
        return "·"
    row = {kinds[one]: one, kinds[other]: other}
    letters = [letter for letter, apart in zip(_ALPHABET, APART, strict=False) if apart.forbids(row)]
    return letters[0] if letters else str(together[frozenset(row.items())] or "not yet")


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _letters() -> Iterator[str]:
    for letter, apart in zip(_ALPHABET, APART, strict=False):
        names = [name for names in DIMENSIONS.values() for name in names]
        parts = [" or ".join(sorted(some, key=names.index)) for some in apart.features]
        yield f"- {letter}: {', '.join(parts)}: {apart.why}{'; stops at start' if apart.said else ''}\n"


def _nearness(results: list[dict[str, Any]]) -> Iterator[str]:
    for number, name in enumerate(those_beside_the_baselines(), 1):
        mine = [result for result in results if name in result["row"].values()]
        if mine:
            equal = sum(result["near"]["float32"]["equal"] for result in mine) / len(mine)
            distance = max(result["near"]["bfloat16"]["typical"] / result["noise"] for result in mine)
            yield f"| {number} | {name} | {len(mine)} | {equal:.1%} | {distance:.2f} |\n"


def circumstances() -> dict[str, str]:
    """Return when, of which commit, with which vLLM and on which processor a page is made."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "vllm": importlib.metadata.version("vllm").partition("+")[0],
        "processor": found[1] if found else "unknown processor",
    }


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    sys.stdout.write(text([json.loads(file.read_text()) for file in files]))
