"""Writes docs/reference/refusals.md from what vLLM on npu really says to each case of tests.support.refusals.

python -m tests.support.refusals_page > docs/reference/refusals.md
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.refusals import ask, cases

if TYPE_CHECKING:
    from tests.support.refusals import Case

__all__ = ["row", "text"]

_HEAD = """# What is refused, and the way out

Each of these stops the start with the sentence beside it; what vLLM itself refuses on any device is here only where it is
met on npu first. `tests/integration/test_refusals.py` asks for all of them, and this page is what came back, written by
`python -m tests.support.refusals_page`. [Settings of vLLM](settings.md) has every setting, refused or not.

| asked for | error | remedy |
|---|---|---|
"""
_KINDS = {
    "mixture": "a mixture of experts",
    "mamba": "Mamba",
    "one-head": "a model with one KV head",
    "one-head-of-windows": "Unlimited-OCR's attention with one KV head",
    "latent": "latent attention",
    "dynamic": "dynamic NTK scaling over 512 positions",
    "with-a-head": "latent attention with a head that drafts",
    "hybrid": "a hybrid with states",
    "bert": "an encoder",
    "llava": "a model that sees",
    "qwen": "a model that sees",
    "olmo-hybrid": "OLMo Hybrid",
    "kimi-linear": "Kimi Linear",
    "of-gpus": "a model that vLLM keeps apart by GPU maker",
}


def text(said: dict[str, str]) -> str:
    """Return the page of what was said to the cases."""
    return "".join([_HEAD, *(row(case, said[name]) for name, case in cases().items())])


def row(case: Case, sentence: str) -> str:
    """Return the line of a case."""
    parts = re.fullmatch(r"(.*?)(?:: |; |\. )(.*)", re.sub(r"\s+", " ", sentence).strip())
    error, remedy = parts.groups() if parts else (sentence, "leave it out")
    return f"| {_asked(case)} | {_cell(error)} | {_cell(remedy.partition(' The layer: ')[0])} |\n"


def _asked(case: Case) -> str:
    parts = [f"`{name}={value}`" for name, value in case.environ.items() if name != "NPU_SIMULATOR_DEVICES"]
    for name, value in case.given.items():
        if name == "model":
            parts.insert(0, _KINDS[value.strip("{}")])
        else:
            written = "" if value is True else " " + (value if isinstance(value, str) else json.dumps(value))
            parts.append(
                f"`--{name.replace('_', '-')}{written}`".replace("{llama}", "MODEL")
                .replace("{one-head}", "MODEL")
                .replace("|", "\\|")
            )
    return ", ".join(parts)


def _cell(words: str) -> str:
    words = words.strip(" .").replace("|", "\\|")
    return words[:1].upper() + words[1:] if re.match(r"[a-z]+(?: |$)", words) and words[:4] != "npu " else words


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(text(ask(cases(), Path(folder))))
