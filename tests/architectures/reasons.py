"""What is known of architectures that do not simply work: reasons.toml, and whether outcomes are as it says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architectures.one import WORKS, Outcome

__all__ = ["REASONS", "unexpected"]

NO_CODE = "transformers has no code for it"
REASONS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text())
"""Architecture -> ``outcome``, and ``reason``, a sentence for the table."""


def unexpected(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield a line for each outcome that is another than the known one."""
    for one in outcomes:
        known = REASONS.get(one.architecture, {}).get("outcome", WORKS)
        if one.outcome != known and one.said != NO_CODE:
            yield f"{one.architecture} {one.outcome} ({one.said}), where reasons.toml has {known!r}"
