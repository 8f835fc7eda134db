"""vLLM's layer classes on the ops, one file a family; importing a file registers its classes with vLLM."""

from __future__ import annotations

import importlib
import pkgutil


def register_all() -> None:
    """Import every file of this folder. Needs vLLM."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
