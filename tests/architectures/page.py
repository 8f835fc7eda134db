"""The table of architectures that the documentation shows, written from outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.architectures.one import NOT_MADE, WORKS, Outcome
from tests.architectures.reasons import NO_CODE, REASONS
from tests.architectures.registry import KINDS

__all__ = ["write"]

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


def write(file: Path, outcomes: Iterable[Outcome]) -> None:
    """Put the tables between the two marks of a page."""
    text = "\n".join(_lines(sorted(outcomes, key=lambda one: one.architecture.lower())))
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    file.write_text(marked.sub(lambda _: f"{BEGIN}\n{text}\n{END}", file.read_text()))


def _lines(outcomes: list[Outcome]) -> Iterable[str]:
    for kind in KINDS:
        ours = [one for one in outcomes if one.kind == kind and one.said != NO_CODE]
        works = [one.architecture for one in ours if one.outcome == WORKS]
        yield f"\n### {kind.capitalize()}\n"
        yield f"{len(works)} give what transformers gives: {', '.join(works)}.\n"
        others = [f"| {one.architecture} | {_said(one)} |" for one in ours if one.outcome != WORKS]
        if others:
            yield from ("| architecture | what becomes of it |", "|---|---|", *others)
    without = [one.architecture for one in outcomes if one.said == NO_CODE]
    yield "\n### Without code in transformers\n"
    yield f"Nothing to compare with here, {len(without)}: {', '.join(without)}."


def _said(one: Outcome) -> str:
    reason = REASONS.get(one.architecture, {}).get("reason")
    if reason:
        return reason
    return f"not made in small: {one.said}" if one.outcome == NOT_MADE else f"{one.outcome}: {one.said}"
