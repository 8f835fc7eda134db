"""The entry point of the platform plugin."""

from __future__ import annotations


def register() -> str | None:
    """Return the platform's dotted name, or None when another accelerator is present."""
    return None
