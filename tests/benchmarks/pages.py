"""Puts what is drawn from a record into a page, between two marks, so that the words around it stay."""

from __future__ import annotations

import re
from pathlib import Path

from tests.benchmarks import machine

ROOT = Path(__file__).parents[2]


def folder() -> Path:
    """Return where this machine's records and pages are."""
    return ROOT / "docs" / "benchmarks" / machine.name()


def insert(page: Path, part: str, text: str, title: str) -> None:
    """Replace a page's part, or append it; a page that is not there begins with the title."""
    begin, end = (f"<!-- {word}: {part} -->" for word in ("drawn", "end"))
    block = f"{begin}\n\n{text.strip()}\n\n{end}"
    old = page.read_text() if page.exists() else f"# {title}\n"
    drawn = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    new = drawn.sub(lambda _: block, old) if drawn.search(old) else f"{old.rstrip()}\n\n{block}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new)
