"""Writes docs/reference/formats.md from what tests/e2e/test_formats.py left of each case that passed.

NPU_FORMATS_RESULTS=FOLDER pytest tests/e2e/test_formats.py; python -m tests.support.formats_page FOLDER > docs/reference/formats.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.formats import CASES, FORMATS, KINDS, REFUSED
from tests.support.matrix_page import circumstances

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cases_of", "now", "text"]

_HEAD = """# Models and formats

Which formats of quantised checkpoints were compared with transformers on which kinds of models. The model is small and random
(`tests/support/models.py`) and its checkpoint written as the format's own tools write it: the projections of attention, of MLPs
and of experts are quantised. The engine answers eight requests, greedy, in bfloat16, with graphs. `nox -s formats` runs all of
it and writes this page; it goes on where it was interrupted, and does one piece with `-- -k "AWQ and states"`.
"""
_NAMES = """
`=`: the logprobs are at most 1.5 times as far from those of the dequantised weights in float32 as transformers' own in bfloat16 are,
which rounds activations where the format does. `not yet`: not run. Letters are refusals at start:

"""
_RAN = """
## What ran

| format | linear layers and experts |
|---|---|
"""
_TOOLS = """
## Made by the tools

`nox -s format_tools` lets the formats' own tools quantise the demo model, on the processor, and measures what npu says of it
likewise:

| tool | what it made |
|---|---|
| llm-compressor 0.14.0.1 | W4A16 by GPTQ, W8A16, W4A8, W8A8, fp8 by tensor, by channel and by block, NVFP4 with and without inputs, MXFP4, MXFP8 |
| ModelOpt 0.47.0 | fp8 by tensor, by channel and by block, NVFP4, MXFP8 |
| AutoRound 0.15.1 | its own format, symmetric and with zero points; GPTQ and AWQ |
| bitsandbytes 0.50.2 | NF4 with nested scales, FP4, int8 |

fp8 by tensor: where a tool gives the projections of a layer scales of their own (llm-compressor does, ModelOpt does not), vLLM
rounds the weights again to the largest of them when it loads, on any device; that is not counted as an error of npu.

| not made, or not run | why |
|---|---|
| AWQ by llm-compressor, NVFP4 by ModelOpt's AWQ | they pin memory for an accelerator, or ask for CUDA by name |
| AWQ by GPTQModel 7.6.0 | `AWQ: CUDA is not available` |
| GPTQ by GPTQModel 7.6.0 | on two cores its pool of threads ends with a ValueError; it was not tried on more |
| mixed precision by ModelOpt, Quark | not tried with these tools; `tests/e2e/test_quantized.py` and `test_quantized_experts.py` have checkpoints in their layouts |
| AWQ in 4 bits, SmoothQuant, W4A8 and MXFP4 by ModelOpt | vLLM 0.32 reads none of these four |
| AutoAWQ, torchao | not tried: AutoAWQ is no longer maintained, and torchao's method is refused on npu by name |
"""
_UNKNOWN = "no time that was written down"
_WHY: dict[str, str] = {}
"""What is refused, by what is said."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def text(results: list[dict[str, Any]]) -> str:
    """Return the page of the cases that passed."""
    passed = {(result["form"], result["kind"]): result["refused"] for result in results}
    names = _NAMES if REFUSED else _NAMES.replace(" Letters are refusals at start:\n", "")
    return "".join([_HEAD, *_times(results), *_table(passed), names, *_letters(), _RAN, *_kernels(results), _TOOLS])


def now() -> str:
    """Return when, of which commit, with which vLLM and where a case runs, as the page names it."""
    return "{date}, commit {commit}, vLLM {vllm}, {processor}".format(**circumstances())


def _times(results: list[dict[str, Any]]) -> Iterator[str]:
    """Say which cases ran when; the most of them without their names."""
    of_time: dict[str, dict[str, list[str]]] = {}
    for result in results:
        of_form = of_time.setdefault(result.get("ran", _UNKNOWN), {})
        of_form.setdefault(result["form"], []).append(result["kind"])
    most, *others = sorted(of_time, key=lambda time: -sum(map(len, of_time[time].values())))
    yield f"{most}.\n"
    for time in others:
        cases = "; ".join(f"{form} on {', '.join(kinds)}" for form, kinds in of_time[time].items())
        yield f"\nOf {time}: {cases}.\n"
    yield "\n"


def cases_of(page: str) -> int:
    """Return how many cases a page has."""
    cells = (cell.strip() for line in page.splitlines() if line.startswith("| ") for cell in line.split("|")[2:])
    return sum(bool(re.fullmatch(r"=|[a-z]|not yet", cell)) for cell in cells)


def _table(passed: dict[tuple[str, str], str | None]) -> Iterator[str]:
    yield f"| | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}\n"
    for form in FORMATS:
        yield f"| {form} | {' | '.join(_cell((form, kind), passed) for kind in KINDS)} |\n"


def _cell(case: tuple[str, str], passed: dict[tuple[str, str], str | None]) -> str:
    assert case in CASES
    if case not in passed:
        return "not yet"
    return "=" if passed[case] is None else _ALPHABET[_sentences().index(passed[case])]


def _sentences() -> list[str | None]:
    return list(dict.fromkeys(REFUSED.values()))


def _letters() -> Iterator[str]:
    for letter, said in zip(_ALPHABET, _sentences(), strict=False):
        yield f"- {letter}: {_WHY[said]}\n"


def _kernels(results: list[dict[str, Any]]) -> Iterator[str]:
    for form in FORMATS:
        ran = sorted({layer for result in results if result["form"] == form for layer in result["layers"]})
        yield f"| {form} | {', '.join(f'`{layer}`' for layer in ran)} |\n"


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    sys.stdout.write(text([json.loads(file.read_text()) for file in files]))
