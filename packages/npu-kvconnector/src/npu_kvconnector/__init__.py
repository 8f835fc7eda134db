"""The entry point of the KV connector plugin."""

from __future__ import annotations


def register() -> None:
    """Register the KV connector with vLLM."""
