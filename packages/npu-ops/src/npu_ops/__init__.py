"""The entry point of the ops plugin."""

from __future__ import annotations


def register() -> None:
    """Register the ops with vLLM."""
